"""A model as it is now: its buffers, attributes and random states, to be put back after runs of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.module_state import ModuleState
from dpscope.flash.torch_side.written_tensors import WrittenTensors
from dpscope.random_states import RandomStates, cuda_devices

_FIRST = 1024
"""Elements of a parameter that are read first."""


class Buffers:
    """The buffers of a model as they are now: which tensors, and their values."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._owned = [(module, dict(module._buffers)) for module in modules]
        tensors = {id(each): each for _, own in self._owned for each in own.values() if each is not None}
        self._values = [(each, each.clone()) for each in tensors.values() if not each.is_inference()]
        self._versions = [each._version for each, _ in self._values]

    def put_back(self) -> None:
        for module, buffers in self._owned:
            module._buffers.clear()
            module._buffers.update(buffers)
        for place, (buffer, value) in enumerate(self._values):
            if buffer._version != self._versions[place]:
                buffer.copy_(value)
                self._versions[place] = buffer._version


class ModelSnapshot:
    """Random states, buffers and attributes of a model as they are now, to be put back after runs of it.

    So is what runs inside of `written` write to parameters.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        modules = list(model.modules())
        self._attributes, self._buffers = ModuleState(model), Buffers(modules)
        self.written = WrittenTensors(model)
        self._random = RandomStates.now(devices)
        owned = [value for module in modules for value in vars(module).values()]
        generators = {
            id(value): value for value in owned if torch.Generator in type(value).__mro__
        }  # isinstance is slow
        self._own = [(generator, generator.get_state()) for generator in generators.values()]

    @contextmanager
    def kept(self, *, attributes: bool = True) -> Iterator[None]:
        """Put everything back after the block; without `attributes`, what modules keep stays."""
        try:
            yield
        finally:
            self._buffers.put_back()
            self.written.put_back()
            self._random.put_back()
            for generator, state in self._own:
                generator.set_state(state)
            if attributes:
                self._attributes.restore()
            # Casts of weights made without gradients would be taken for those of the real forward.
            torch.clear_autocast_cache()


@contextmanager
def filled(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Give parameters that are zero small random values inside the block."""
    for index, parameter in enumerate(parameters):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.data.copy_(0.1 * values)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.data.zero_()


def all_zero(parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters whose elements are all zero."""
    found = [parameter for parameter in parameters if parameter.numel()]
    for first in (_FIRST, None):  # most have an element that is not zero among the first: few are read as a whole
        kinds: dict[object, list[nn.Parameter]] = {}  # one wait for each
        for parameter in found:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        found = []
        for alike in kinds.values():
            parts = [each if each.numel() <= _FIRST else each.reshape(-1)[:first] for each in (p.data for p in alike)]
            sizes = read(torch.stack(torch._foreach_norm(parts, math.inf)), 1.0)
            found += [each for each, size in zip(alike, sizes, strict=True) if size == 0]
    return found


def untouched(model: nn.Module) -> AbstractContextManager[None]:
    """Restore random states, buffers and attributes of the model after the block."""
    return ModelSnapshot(model, cuda_devices(model)).kept()

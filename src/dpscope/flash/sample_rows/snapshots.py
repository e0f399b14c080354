"""A model as it is now: its buffers, attributes and random states, to be put back after runs of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.module_state import ModuleState
from dpscope.flash.torch_side.written_tensors import WrittenTensors
from dpscope.random_states import RandomStates, cuda_devices

_FIRST = 1024
"""Elements of a parameter that are read first."""


class Buffers:
    """The buffers of a model as they are now: which tensors, and their values."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = [(module, dict(module._buffers)) for module in model.modules()]
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
        self._attributes, self._buffers = ModuleState(model), Buffers(model)
        self.written = WrittenTensors(model)
        self._random = RandomStates.now(devices)
        owned = [value for module in model.modules() for value in vars(module).values()]
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
def opened_gates(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Fill parameters that are zero inside the block: a closed gate, or LoRA's B, would hide what it multiplies."""
    # Most parameters have an element that is not zero among the first: few are read as a whole.
    closed = _all_zero(_all_zero([parameter.data for parameter in parameters], first=_FIRST))
    for index, gate in enumerate(closed):
        values = torch.randn(gate.shape, generator=torch.Generator().manual_seed(index))
        gate.copy_(0.1 * values)
    try:
        yield
    finally:
        for gate in closed:
            gate.zero_()


def _all_zero(tensors: Collection[Tensor], first: int | None = None) -> list[Tensor]:
    """Return the tensors whose elements, or `first` elements, are all zero."""
    found: dict[torch.device, list[Tensor]] = {}  # one wait for each device
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor.reshape(-1)[:first].any())
    values = {device: iter(read(torch.stack(each), True)) for device, each in found.items()}
    return [tensor for tensor in tensors if not next(values[tensor.device])]


def untouched(model: nn.Module) -> AbstractContextManager[None]:
    """Restore random states, buffers and attributes of the model after the block."""
    return ModelSnapshot(model, cuda_devices(model)).kept()

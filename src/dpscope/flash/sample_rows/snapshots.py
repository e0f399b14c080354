"""A model as it is now: its buffers, attributes and random states, to be put back after runs of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.module_state import ModuleState
from dpscope.random_states import RandomStates, cuda_devices


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
    """Random states, buffers and attributes of a model as they are now, to be put back after runs of it."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes, self._buffers = ModuleState(model), Buffers(model)
        self._random = RandomStates.now(cuda_devices(model))
        generators = {id(v): v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Generator)}
        self._own = [(generator, generator.get_state()) for generator in generators.values()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put everything back after the block."""
        try:
            yield
        finally:
            self._buffers.put_back()
            self._random.put_back()
            for generator, state in self._own:
                generator.set_state(state)
            self._attributes.restore()
            # Casts of weights made without gradients would be taken for those of the real forward.
            torch.clear_autocast_cache()


@contextmanager
def opened_gates(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Fill parameters that are zero inside the block: a closed gate, or LoRA's B, would hide what it multiplies."""
    parameters = list(parameters)
    opened = [parameter.detach().any().cpu() for parameter in parameters]
    is_open = read(torch.stack(opened), True) if opened else []
    closed = [parameter.data for parameter, opens in zip(parameters, is_open, strict=True) if not opens]
    for index, gate in enumerate(closed):
        values = torch.randn(gate.shape, generator=torch.Generator().manual_seed(index))
        gate.copy_(0.1 * values)
    try:
        yield
    finally:
        for gate in closed:
            gate.zero_()


def untouched(model: nn.Module) -> AbstractContextManager[None]:
    """Restore random states, buffers and attributes of the model after the block."""
    return ModelSnapshot(model).kept()

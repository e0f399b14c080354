"""A unit: a module that runs sample by sample with all it contains, and what is known of its arguments."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from dpscope.flash.layers.sample_dims import sample_dims
from dpscope.flash.sample_rows.proxy import Proxy
from dpscope.flash.taps.taps import Engine, TapOfSamples, refuse_replaced
from dpscope.flash.torch_side.module_state import ModuleState


class UnitCall(nn.Module):
    """Lets functional_call replace the unit's parameters without running the unit's hooks a second time.

    It returns the output and the state that forward left on the unit, and removes that state. Parameters are already
    replaced then: some modules (nn.LSTM) store them in attributes.
    """

    def __init__(self, unit: nn.Module, forward: Any) -> None:
        super().__init__()
        self.unit = unit
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        state = ModuleState(self.unit)
        try:
            output = self._run(*args, **kwargs)
        finally:
            changes = state.take_changes()
        return output, changes


class UnitTap(TapOfSamples):
    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.functional = UnitCall(module, self.original)
        self.slots = {key: engine.slot(parameter) for key, parameter in module.named_parameters()}
        self.input_dims, self.output_dims = sample_dims(module)
        self.per_sample: dict[Any, bool] = {}  # arguments of which it is known: SampleCall.key -> one entry a sample?

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters as its forward finds them: FSDP2 replaces shards by whole ones around it."""
        found = {
            key: cast("nn.Parameter", p.plain) if isinstance(p, Proxy) else p  # one that is followed elsewhere, too
            for key, p in self.module.named_parameters()
        }
        for key, parameter in found.items():
            slot = self.slots.get(key)
            if slot is None or not slot.stands_for(parameter):
                refuse_replaced(self, key)
        return found

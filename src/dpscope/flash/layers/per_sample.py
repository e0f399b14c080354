"""Per-sample modules, which run sample by sample with all they contain: their parameters, and where samples are."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from dpscope.flash.gradients.explanation import why_opaque
from dpscope.flash.sample_rows.proxy import Proxy
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import TapOfSamples, refuse_replaced
from dpscope.flash.torch_side.module_state import ModuleState

# Argument name -> dimension of samples (None: shared by all samples), 0 where nothing is said; outputs in order.
SampleDims = tuple[dict[str, int | None], tuple[int, ...]]


def is_opacus_layer(module: nn.Module, name: str) -> bool:
    """Return whether it is Opacus's layer of that name, or a subclass: Opacus need not be installed."""
    return any(cls.__name__ == name and cls.__module__.startswith("opacus.") for cls in type(module).__mro__)


def is_recurrent(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) or is_opacus_layer(module, "DPRNNBase")


def sample_dims(module: nn.Module) -> SampleDims:
    first = 0 if getattr(module, "batch_first", True) else 1
    if is_recurrent(module):
        # States are (layers · directions, B, ·), whatever batch_first says. Opacus calls `hx` `state_init`.
        return {"input": first, "hx": 1, "state_init": 1}, (first, 1, 1)
    if isinstance(module, nn.MultiheadAttention) or is_opacus_layer(module, "DPMultiheadAttention"):
        return {"query": first, "key": first, "value": first, "attn_mask": None}, (first, 0)
    return {}, ()


def hides_samples_from_its_layers(module: nn.Module) -> bool:
    """Return whether layers inside it see another first dimension, so that only the whole can be tapped."""
    return is_opacus_layer(module, "DPMultiheadAttention") and not module.batch_first


class FunctionalForward(nn.Module):
    """Lets functional_call replace a module's parameters without running the module's hooks a second time.

    It returns the output and the state that forward left on the module, and removes that state. Parameters are already
    replaced then: some modules (nn.LSTM) store them in attributes.
    """

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module = module
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        state = ModuleState(self.module)
        try:
            output = self._run(*args, **kwargs)
        finally:
            changes = state.take_changes()
        return output, changes


def parameter_key(name: str) -> str:
    """Return the name of a module's parameter or buffer in its `FunctionalForward`."""
    return f"module.{name}"


class PerSampleTap(TapOfSamples):
    """Tap of a module that runs sample by sample."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.functional = FunctionalForward(module, self.original)
        self.slots = {key: engine.slot(parameter) for key, parameter in module.named_parameters()}
        self.input_dims, self.output_dims = sample_dims(module)
        # Arguments by SampleCall.key: those all samples share, and numbers of samples that others had as many rows for.
        self.shared_arguments: set[Any] = set()
        self.numbers_of: dict[Any, set[int]] = {}
        self.by_loop = False
        self.describe("torch.func.vmap over samples")

    def describe(self, how: str) -> None:
        """Describe for `explain()` how samples are run from now on."""
        self.why = why_opaque("" if self.module is self.engine.model else self.name, self.module, how)
        for slot in self.slots.values():
            slot.describe("opaque", self.why)

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

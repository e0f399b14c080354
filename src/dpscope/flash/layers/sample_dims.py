"""Modules known to have their samples in a dimension other than 0."""

from __future__ import annotations

from torch import nn

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
    """Return whether layers inside it see another first dimension, so that only the whole can be one unit."""
    return is_opacus_layer(module, "DPMultiheadAttention") and not module.batch_first

"""torch's own layers, as they were when dpscope was imported.

A family may replace a layer's forward only where that forward is torch's, with every method and function it reaches. A
subclass that overrides one of them, an instance or class that was patched, a `__getattr__` or property that gives out
other weights: none of these is the layer that its class suggests.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

_INSTANCE = ("_apply_instance_norm", "_check_input_dim", "_get_no_batch_dim", "_handle_no_batch_input")

# Class -> the methods that its forward reaches, and the functions of torch.nn.functional.
_REACHES: dict[type[nn.Module], tuple[tuple[str, ...], tuple[str, ...]]] = {
    nn.Linear: ((), ("linear",)),
    nn.Conv1d: (("_conv_forward",), ("conv1d", "pad")),
    nn.Conv2d: (("_conv_forward",), ("conv2d", "pad")),
    nn.Conv3d: (("_conv_forward",), ("conv3d", "pad")),
    nn.Embedding: ((), ("embedding",)),
    nn.LayerNorm: ((), ("layer_norm",)),
    nn.RMSNorm: ((), ("rms_norm",)),
    nn.GroupNorm: ((), ("group_norm",)),
    nn.InstanceNorm1d: (_INSTANCE, ("instance_norm",)),
    nn.InstanceNorm2d: (_INSTANCE, ("instance_norm",)),
    nn.InstanceNorm3d: (_INSTANCE, ("instance_norm",)),
}
_RECURRENT = ("check_forward_args", "check_input", "permute_hidden", "get_expected_hidden_size")
_REACHES |= dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), (_RECURRENT, ()))
_METHODS = {
    cls: {name: inspect.getattr_static(cls, name) for name in ("forward", *methods)}
    for cls, (methods, _) in _REACHES.items()
}
_FUNCTIONS = {name: getattr(F, name) for _, functions in _REACHES.values() for name in functions}
_LOOKUPS = {name: inspect.getattr_static(nn.Module, name, None) for name in ("__getattr__", "__getattribute__")}


def _is_of_torch(function: Any) -> bool:
    """Return whether it was defined in torch, and not put there before dpscope was imported."""
    module: str = getattr(function, "__module__", None) or "torch"
    return module.partition(".")[0] == "torch"


_PATCHED_BEFORE = {
    cls
    for cls, methods in _METHODS.items()
    if not all(map(_is_of_torch, methods.values()))
    or not all(_is_of_torch(_FUNCTIONS[name]) for name in _REACHES[cls][1])
}


def remember(cls: type[nn.Module]) -> None:
    """Remember the current forward of a class that users registered as its own."""
    _METHODS.setdefault(cls, {"forward": inspect.getattr_static(cls, "forward")})


def class_is_own(kind: type[nn.Module], cls: type[nn.Module], names: Iterable[str]) -> bool:
    """Return whether modules of class `kind` compute what torch's `cls` computes from the parameters `names`."""
    if cls in _PATCHED_BEFORE:
        return False
    functions = _REACHES.get(cls, ((), ()))[1]
    return (
        all(inspect.getattr_static(kind, name, None) is own for name, own in _METHODS.get(cls, {}).items())
        and all(inspect.getattr_static(kind, name, None) is own for name, own in _LOOKUPS.items() if own is not None)
        and all(inspect.getattr_static(kind, name, None) is None for name in names)
        and all(getattr(F, name) is _FUNCTIONS[name] for name in functions)
    )


def instance_is_own(module: nn.Module, cls: type[nn.Module], names: Iterable[str]) -> bool:
    """Return whether nothing in the instance's dictionary hides its methods or parameters."""
    own = vars(module)
    return not any(name in own for name in (*_METHODS.get(cls, {}), *names) if name != "forward")


def foreign_mode_is_active() -> bool:
    """Return whether a torch function mode is active other than torch's own (a device) and ours."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__module__.partition(".")[0] not in ("torch", "dpscope") for mode in stack)

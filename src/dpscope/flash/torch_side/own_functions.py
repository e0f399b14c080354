"""Functions of torch that were replaced by others, such as `F.layer_norm = mine`.

torch looks a function up by its name when it hands it to a torch function mode or to a tensor's `__torch_function__`.
What arrives there is the replacement, although it is running already, and calling it would apply it twice.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F

from dpscope.errors import UserError

_NATIVE = frozenset((BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType))
_PLACES = (F, torch.functional, torch.Tensor)


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] == "torch"


_FUNCTIONS = {
    (place, name): function if _is_torchs(function) else None  # replaced before this was imported
    for place in _PLACES
    for name, function in vars(place).items()
    if isinstance(function, FunctionType)
}
_OWN = frozenset(id(function) for function in _FUNCTIONS.values() if function is not None)


def torchs_own(func: Any) -> Any:
    """Return the function of torch that `func` replaces, or `func` if it replaces none."""
    if type(func) in _NATIVE or id(func) in _OWN:
        return func
    for place in _PLACES:
        for name, function in vars(place).items():
            if function is func:
                own = _FUNCTIONS.get((place, name), func)
                if own is None:
                    raise UserError(f"torch's {name} was replaced before dpscope was imported: import dpscope first")
                return own
    return func

"""Dropout switched off: it draws other numbers for a batch than for its samples one by one."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dpscope.flash.torch_side.own_functions import torchs_own

_DROPOUTS = {
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
_PRODUCTS = F.scaled_dot_product_attention
_ATTENTION = F.multi_head_attention_forward
_ATTENTION_ARGUMENTS = inspect.signature(_ATTENTION)


class WithoutDropout(TorchFunctionMode):
    """Context in which torch's dropout gives back what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = torchs_own(func), dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is _PRODUCTS:
            args, kwargs["dropout_p"] = (*args[:4], *args[5:]), 0.0
            if len(args) > 4:
                kwargs["is_causal"], args = args[4], args[:4]
        if func is _ATTENTION:  # what it calls is out of this mode's sight
            bound = _ATTENTION_ARGUMENTS.bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        return func(*args, **kwargs)

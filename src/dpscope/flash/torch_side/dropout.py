"""Dropout switched off: it draws other numbers for a batch than for its samples one by one."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
_ATTENTION_ARGUMENTS = inspect.signature(F.multi_head_attention_forward)


class WithoutDropout(TorchFunctionMode):
    """Context in which torch's dropout gives back what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs["dropout_p"] = (*args[:4], *args[5:]), 0.0
            if len(args) > 4:
                kwargs["is_causal"], args = args[4], args[:4]
        if func is F.multi_head_attention_forward:  # what it calls is out of this mode's sight
            bound = _ATTENTION_ARGUMENTS.bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        return func(*args, **kwargs)

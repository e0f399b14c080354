"""torch's clip_grad_value_ for parameters without a gradient: it warns, where torch fails with an error of its own."""

from __future__ import annotations

import warnings
from typing import Any

from torch.nn.utils import clip_grad

_GROUPS = "_group_tensors_by_device_and_dtype"


def allow_no_gradients() -> None:
    """Have `clip_grad_value_` warn if no parameter has a gradient, as between backward and a private step."""
    group = getattr(clip_grad, _GROUPS, None)
    if group is None or group.__module__ == __name__:
        return

    def grouped(tensors: list[list[Any]], *args: Any, **kwargs: Any) -> Any:
        if any(tensors):
            return group(tensors, *args, **kwargs)
        warnings.warn(
            "clip_grad_value_ found no gradients: clipped sums stay inside the engine until noise is added, so it has "
            "no effect. Remove it",
            stacklevel=3,
        )
        return {}

    setattr(clip_grad, _GROUPS, grouped)

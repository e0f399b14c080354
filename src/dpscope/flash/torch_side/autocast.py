"""Autocast for the operands of a layer: their dtype, and one cast of an input that several layers read.

Taps ask in every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, get_autocast_dtype, is_autocast_enabled


class SharedCast:
    """Casts under autocast. The last one is remembered weakly: q, k and v read one tensor and store one cast of it."""

    __slots__ = ("_result", "_source", "_version")

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._result: weakref.ref[Tensor] | None = None
        self._version = -1

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dtype in (dtype, torch.float64) or not x.is_floating_point():
            return x
        if self._source is not None and self._source() is x and self._version == x._version:
            result = self._result() if self._result is not None else None
            if result is not None and result.dtype == dtype:
                return result
        result = x.to(dtype)
        self._source, self._result, self._version = weakref.ref(x), weakref.ref(result), x._version
        return result


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes in on x's device; None if it is off."""
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
    return get_autocast_dtype(device) if is_autocast_enabled(device) else None


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Switch autocast off, so that norms and sums are computed in the precision of what was recorded."""
    return torch.autocast(device, enabled=False) if is_autocast_enabled(device) else nullcontext()


# Normalisations of a tensor (1, 2, 2).
_PROBES: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (2,)),
    "group_norm": lambda x: F.group_norm(x, 1),
    "instance_norm": F.instance_norm,
}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def autocast_output_dtype(operator: str, device: str, x: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the output dtype of a normalisation in autocast to `dtype`, for an input of dtype x.

    The operators that autocast runs in float32 differ between devices and torch versions. So it is run once, on a tiny
    tensor.
    """
    return _PROBES[operator](torch.ones(1, 2, 2, dtype=x, device=device)).dtype

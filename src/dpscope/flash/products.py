"""Temporary torch versions of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def bias_sums(g: Tensor) -> Tensor:
    return g.sum(1, dtype=wide(g.dtype))


def layer_norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    w = wide(g.dtype)
    return (g.to(w) * (x.to(w) - mean[..., None]) * rstd[..., None]).sum(1), g.sum(1, dtype=w)


def rms_norm_sums(g: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    w = wide(g.dtype)
    return (g.to(w) * x.to(w) * rstd[..., None]).sum(1)

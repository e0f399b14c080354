"""Float32 products as on a GPU where the user allows TF32: operands are rounded to ten bits behind the point."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpscope.flash import block_reruns, combination, norms, paths
from dpscope.flash.kernels import gram_norms, scaled_sum


def to_tf32(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def round_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where torch knows no TF32: its products are replaced, and the engine is told."""
    bmm, addmm_ = torch.bmm, torch.Tensor.addmm_
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(to_tf32(a), to_tf32(b)))
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda out, a, b: addmm_(out, to_tf32(a), to_tf32(b)))
    for module in (block_reruns, combination, paths, gram_norms, norms, scaled_sum):
        monkeypatch.setattr(module, "operand_rounding", lambda device: 2.0**-11)
    for module in (norms, paths):
        monkeypatch.setattr(module, "reads_tf32", lambda device: True)

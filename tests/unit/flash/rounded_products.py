"""Float32 products as on a GPU where the user allows TF32: operands are rounded to ten bits behind the point."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpscope.flash.checkpointing import checkpointed_blocks
from dpscope.flash.gradients import norms, paths
from dpscope.flash.kernels import gram_norms, scaled_sum
from dpscope.flash.kernels.float32_products import ROUNDING
from dpscope.flash.step import microbatch


def to_tf32(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def to_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float() if tensor.dtype == torch.float32 else tensor


def round_products(monkeypatch: pytest.MonkeyPatch, kind: str = "tf32") -> None:
    """On the CPU, where torch knows no TF32, and few know bf16: its products are replaced, and the engine is told."""
    bmm, addmm_, rounded = torch.bmm, torch.Tensor.addmm_, {"tf32": to_tf32, "bf16": to_bfloat16}[kind]
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(rounded(a), rounded(b)))
    monkeypatch.setattr(
        torch.Tensor, "addmm_", lambda out, a, b, **scales: addmm_(out, rounded(a), rounded(b), **scales)
    )
    for module in (checkpointed_blocks, paths, gram_norms, microbatch, scaled_sum):
        monkeypatch.setattr(module, "operand_rounding", lambda device: ROUNDING[kind])
    for module in (norms, paths):
        monkeypatch.setattr(module, "reads_tf32", lambda device: kind == "tf32")

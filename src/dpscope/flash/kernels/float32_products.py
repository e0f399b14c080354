"""Rounding of the operands of float32 matrix products (TF32), which the user sets and the engine follows.

A product of rounded operands differs from the exact gradient, and if positions cancel it may be much larger. So norm
and sum have to be of the same rounded products, or both of operands that TF32 holds without rounding
(`truncated_to_tf32`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import capability, device_index
from dpscope.flash.torch_side.attributes import temporarily

ROUNDING = {"tf32": 2.0**-11, "bf16": 2.0**-8}

TF32_ROUNDING = ROUNDING["tf32"]

_BITS_OF_TF32 = ~0x1FFF  # sign, exponent and ten bits of the fraction


def operand_rounding(device: torch.device) -> float:
    """Return the largest relative error of an operand of a float32 product on `device`; 0 if none is rounded."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    chosen = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if chosen is not None:  # torch 2.9 and later; what was said in the old way is seen here, too
        return ROUNDING.get(chosen, 0.0)
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        return 0.0 if precision == "highest" else ROUNDING["tf32"]
    return ROUNDING["bf16"] if precision == "medium" else 0.0


def reads_tf32(device: torch.device) -> bool:
    """Return True if float32 products on `device` read their operands as TF32.

    CPUs and older GPUs may be allowed to round, and usually do not. Their products are used unchanged.
    """
    rounds = device.type == "cuda" and operand_rounding(device) == TF32_ROUNDING
    return rounds and torch.version.hip is None and capability(device_index(device)) >= (8, 0)


def cudnn_in_tf32(device: torch.device, operator: str) -> bool:
    """Return True if cuDNN may read float32 operands as TF32, which is its default. operator: "conv" or "rnn"."""
    if device.type != "cuda" or torch.version.hip is not None or capability(device_index(device)) < (8, 0):
        return False
    chosen = getattr(getattr(torch.backends.cudnn, operator, None), "fp32_precision", None)
    return torch.backends.cudnn.allow_tf32 if chosen is None else chosen == "tf32"


def convolves_unrounded() -> bool:
    """Return True if convolutions and matrix products on a CPU leave float32 operands as they are."""
    chosen = getattr(getattr(torch.backends.mkldnn, "conv", None), "fp32_precision", None)
    return chosen not in ROUNDING and not operand_rounding(torch.device("cpu"))


@contextmanager
def rounded_as_cudnn(device: torch.device, operator: str) -> Iterator[None]:
    """Round operands of float32 matrix products inside the block if cuDNN's `operator` rounds its own."""
    if not cudnn_in_tf32(device, operator) or operand_rounding(device) > 0.0:
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    option, rounded = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    with temporarily(matmul, **{option: rounded}):
        yield


def truncated_to_tf32(tensor: Tensor) -> Tensor:
    """Copy a float32 tensor without the 13 bits that TF32 does not hold. inf and NaN are preserved."""
    return torch.bitwise_and(tensor.view(torch.int32), _BITS_OF_TF32).view(torch.float32)

"""GPUs as data: memory, compute capability, peak rates, and the source of each.

Rates are the vendor's peaks (dense, no sparsity). A step sustains a part of them (`work.py`), which was measured on an
H200; times on other cards are scaled from their data sheets, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpscope.errors import UserError
from dpscope.units import GIB, MIB

HALF, TF32, FP32 = "half", "tf32", "fp32"  # how a card makes products


@dataclass(frozen=True)
class Card:
    """A GPU. `memory_gib`: what torch reports as its total memory; rates in units a second."""

    name: str
    title: str
    memory_gib: float
    capability: tuple[int, int]
    multiprocessors: int
    half_flops: float  # fp16, and bf16 where it has that; tensor cores
    tf32_flops: float  # float32 products where TF32 is allowed
    fp32_flops: float
    bytes_per_second: float
    source: str
    measured: bool = False

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def has_bf16(self) -> bool:
        """True if tensor cores take bf16. Older cards make bf16 products as float32 ones."""
        return self.capability >= (8, 0)

    def flops_of(self, dtype: torch.dtype, *, tf32: bool) -> tuple[str, float]:
        """Return how products of a format are made, and their peak rate."""
        if dtype.itemsize <= 2 and (dtype != torch.bfloat16 or self.has_bf16):
            return HALF, self.half_flops
        return (TF32, self.tf32_flops) if tf32 else (FP32, self.fp32_flops)

    @property
    def context_bytes(self) -> int:
        """Memory of the driver, the CUDA context and loaded kernels, beside torch's allocator."""
        return int(0.6 * GIB)

    @property
    def usable_bytes(self) -> int:
        """Memory that torch's allocator can have."""
        return self.memory_bytes - self.context_bytes

    @property
    def workspace_bytes(self) -> int:
        """Workspaces of cuBLAS in torch's allocator: one each for forward's and backward's thread, and cuBLASLt's."""
        each = 32 * MIB if self.capability[0] >= 9 else 4096 * 2 * 1024 + 16 * 8 * 1024
        return 2 * each + MIB


_AMPERE = "NVIDIA A100 data sheet (2021)"
_HOPPER = "NVIDIA H100 data sheet (2023), SXM5"
_VOLTA = "NVIDIA V100 data sheet (2020)"
# name, title, GiB, capability, multiprocessors, TFLOP/s of half, TF32, float32 products, TB/s, source, measured
_TABLE: tuple[Any, ...] = (
    ("t4", "NVIDIA T4", 14.6, (7, 5), 40, 65, 8.1, 8.1, 0.32, "NVIDIA T4 data sheet (2019)"),
    ("v100-16gb", "V100 16 GB", 15.8, (7, 0), 80, 125, 15.7, 15.7, 0.9, _VOLTA),
    ("v100-32gb", "V100 32 GB", 31.7, (7, 0), 80, 125, 15.7, 15.7, 0.9, _VOLTA),
    ("a10", "NVIDIA A10", 22.5, (8, 6), 72, 125, 62.5, 31.2, 0.6, "NVIDIA A10 data sheet (2021)"),
    ("rtx4090", "GeForce RTX 4090", 23.5, (8, 9), 128, 165, 82.6, 82.6, 1.008, "NVIDIA Ada whitepaper (2022)"),
    ("l4", "NVIDIA L4", 22.0, (8, 9), 58, 121, 60, 30.3, 0.3, "NVIDIA L4 data sheet (2023)"),
    ("l40s", "NVIDIA L40S", 44.4, (8, 9), 142, 362, 183, 91.6, 0.864, "NVIDIA L40S data sheet (2023)"),
    ("a100-40gb", "A100 40 GB", 39.4, (8, 0), 108, 312, 156, 19.5, 1.555, _AMPERE),
    ("a100-80gb", "A100 80 GB", 79.2, (8, 0), 108, 312, 156, 19.5, 2.039, _AMPERE),
    ("h100-80gb", "H100 80 GB", 79.1, (9, 0), 132, 989, 494, 67, 3.35, _HOPPER),
    ("h200", "H200 141 GB", 139.8, (9, 0), 132, 989, 494, 67, 4.8, "NVIDIA H200 data sheet (2024)", True),
    ("b200", "B200 180 GB", 178.4, (10, 0), 148, 2250, 1100, 75, 7.7, "NVIDIA DGX B200 data sheet (2024)"),
)
CARDS = {row[0]: Card(*row[:5], *(1e12 * rate for rate in row[5:9]), *row[9:]) for row in _TABLE}


def find_card(name: str) -> Card:
    """Return the card with a name, or raise `UserError` that lists the known names."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    card = CARDS.get(key) or CARDS.get(
        {"a100": "a100-80gb", "h100": "h100-80gb", "4090": "rtx4090", "v100": "v100-32gb"}.get(key, "")
    )
    if card is None:
        raise UserError(f"unknown card {name!r}: choose one of {', '.join(CARDS)}")
    return card

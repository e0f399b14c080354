"""Per-sample weight gradients and their squared norms, in one kernel.

    V_b = G_bᵀX_b,      g: (B, T, p), x: (B, T, d), V: (B, p, d) in the operands' dtype, and Σ ‖V_b‖² in parts

torch.bmm makes the same products, and the norms then read all of them once more. Here the norms are taken where the
products are: in registers, while the tensor cores are busy with other rows (sample_product_kernels.py).

Guarantee: norms are of the values that are stored, after their rounding; the sums that follow are of those same values.
Products are accumulated in float32 and rounded once. Every finite value has its square: a part, of 64 × 256 values, is
added up in float32, and again, scaled by a power of two, where its squares leave float32's range. A part that holds inf
or NaN is inf or NaN.

Served: bfloat16 on GPUs of compute capability 9.0 (wgmma), at least two samples of at least 64 positions, with rows on
16-byte words. Milliseconds for all 121 products of preset 1b, on an H200, with torch 2.11 and Triton 3.6 (CUDA events,
medians of 7, 2026-11-16; `python benchmarks/kernels/bench_sample_products.py` measures the same):

    B × T          bmm + norms     SHORT_SAMPLES     LONG_SAMPLES
    32 × 256       35.0 + 21.1              33.9             38.1
    16 × 512       29.0 + 11.7              31.9             30.4
    8 × 1024       25.0 +  6.6              26.6             26.2
    16 × 1024      50.6 + 11.6              52.7             51.5
    4 × 2048       25.6 +  3.8              25.3             24.6

The kernel is written in Gluon, which Triton calls experimental. So the first call of a process on a device multiplies
small integers, whose products are known exactly. If that fails in any way, the kernel is off in this process, with a
warning, and callers get None, as they do for what is not served.
"""

from __future__ import annotations

import threading
import warnings
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import capability, device_index, has_triton, rows_are_aligned
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.captures import is_captured
from dpscope.vocabulary.components import PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import GEMM, Launch, allocates, announce


class ProductTiles(NamedTuple):
    """Positions a step; steps in shared memory; steps that one half of a tile is ahead of the other."""

    block_k: int
    stages: int
    lead: int


SHORT_SAMPLES = ProductTiles(64, 4, 2)
LONG_SAMPLES = ProductTiles(32, 8, 3)

LONG = 384
"""Positions from which LONG_SAMPLES are faster: between the lengths that were measured."""

SHORTEST = 64
"""Positions: with fewer, most of a step would be zeros."""

OLDEST_GLUON = (3, 6)
"""The Triton whose Gluon the kernel is written in."""

NORM_ERROR = 1e-5
"""What the first product's norms may differ by."""

_checked: set[tuple[torch.device, ProductTiles]] = set()
_faults: list[str] = []  # of first products; with any, the kernel is off
_checking = threading.Lock()


def products_and_norms(x: Tensor, g: Tensor, *, tiles: ProductTiles | None = None) -> tuple[Tensor, Tensor] | None:
    """Return g_bᵀ x_b, (B, p, d) in the dtype of x and g, and parts of their squared norms, (B, parts) float64.

    Return None if the kernel does not serve the call. `tiles` forces a configuration (for measurements).
    """
    if not makes_norms(x, g):
        return None
    tiles = tiles or (LONG_SAMPLES if g.shape[1] >= LONG else SHORT_SAMPLES)
    if not _is_right(g.device, tiles):
        return None
    values, squares = _launch(x, g, tiles)
    announce(
        lambda: Launch(
            name="_sample_products_kernel",
            family=GEMM,
            reads=[g, x],
            writes=[values, squares],
            flops=2 * g.numel() * x.shape[2],
        )
    )
    return values, squares


def makes_norms(x: Tensor, g: Tensor) -> bool:
    """Return True if products of x and g are expected to come with their norms. The first product decides."""
    is_bfloat16 = g.dtype == torch.bfloat16 and x.dtype == torch.bfloat16
    return is_bfloat16 and not _faults and _has_wgmma(g.device) and g.device == x.device and _is_served(x, g)


def _is_served(x: Tensor, g: Tensor) -> bool:
    """Return True if the kernel serves x and g. If d is a multiple of 8, rows of values start on 16-byte words, too."""
    return _are_served(x.shape, g.shape) and rows_are_aligned(x, g)


@lru_cache(maxsize=1024)  # asked by every layer in every backward pass
def _are_served(x: torch.Size, g: torch.Size) -> bool:
    if len(x) != 3 or len(g) != 3 or x[:2] != g[:2]:
        return False
    (batch, length, d), p = x, g[2]
    return batch >= 2 and length >= SHORTEST and p > 0 and d > 0 and d % 8 == 0


def _has_wgmma(device: torch.device) -> bool:
    """Return whether the device has wgmma: only capability 9.0 does, later GPUs have other instructions."""
    if device.type != "cuda" or not (dry_run.current() is not None or has_triton(*OLDEST_GLUON)):
        return False
    return capability(device_index(device)) == (9, 0)


def _launch(x: Tensor, g: Tensor, tiles: ProductTiles, programs: int | None = None) -> tuple[Tensor, Tensor]:
    if dry_run.current() is not None:
        return _like_launched(x, g)
    from dpscope.flash.kernels.sample_product_kernels import launch

    return launch(x, g, *tiles, programs)


@allocates(PER_SAMPLE_GRADIENTS, "aten::empty")
def _like_launched(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors like a launch's, for a dry run: tiles have 128 rows and 256 columns, in two halves."""
    (batch, _, p), d = g.shape, x.shape[2]
    parts = -(-p // 128) * -(-d // 256) * 2
    return g.new_empty((batch, p, d)), g.new_empty((batch, parts), dtype=torch.float64)


# -- the first use -----------------------------------------------------------------------------------------------------


def _is_right(device: torch.device, tiles: ProductTiles) -> bool:
    """Check the kernel's first product on this device, outside of CUDA graph captures. Return True if it is right."""
    if dry_run.current() is not None:
        return True
    key = (device, tiles)
    if key not in _checked:
        if is_captured():
            return False
        with _checking:  # backward has a thread a device
            if key not in _checked and not _faults:
                _check(device, tiles)
                _checked.add(key)
    return not _faults


def _check(device: torch.device, tiles: ProductTiles) -> None:
    """Run the kernel once. If it fails or its result is wrong, turn it off for the process and warn."""
    try:
        problem = _problem(device, tiles)
    except Exception as error:  # Gluon may fail in any way: at import, in the compiler, at the launch
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if problem:
        _faults.append(problem)
        warnings.warn(
            f"dpscope's kernel for per-sample products does not work here ({problem}). It is off in this process; "
            "slower code gives the same results. Another version of Triton may help.",
            stacklevel=2,
        )


def _problem(device: torch.device, tiles: ProductTiles) -> str | None:
    """Describe the error of a product of small integers. float32 holds their sums, so the rounded values are known.

    T is odd, rows and columns fill no tile, and there are so few programs that each has several tiles. Squares of the
    second sample are below float32's range.
    """
    batch, length, p, d = 2, 333, 392, 264
    g, x = (
        (torch.arange(batch * length * width, device=device) * factor % 251 - 125).view(batch, length, width).float()
        for width, factor in ((p, 73), (d, 31))
    )
    for tensor in (g, x):
        tensor[1] *= 2.0**-50
    exact = torch.bmm(g.double().mT, x.double()).to(torch.bfloat16)
    values, squares = _launch(x.to(torch.bfloat16), g.to(torch.bfloat16), tiles, programs=3)
    if not torch.equal(values, exact):
        return "a product of known values is wrong"
    expected = exact.double().square().flatten(1).sum(1)
    if not bool(((squares.sum(1) - expected).abs() <= NORM_ERROR * expected).all()):
        return "the norm of a product of known values is wrong"
    return None

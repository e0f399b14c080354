"""The clipped sum of per-sample weight gradients: one GEMM a layer.

    out = Σ_b c_b G_bᵀX_b,      g: (B, T, p), x: (B, T, d), scale c: (B,) float32, out: (p, d)

The factor is applied in the float32 accumulator. Rounding c_b·g to bfloat16 instead would put an error of 2⁻⁹ on every
position, which need not cancel where the positions' gradients do: a sample could exceed its bound. Here c_b multiplies
the sample's whole gradient, exactly as the norm saw it.

The kernel walks K = B·T sample by sample and keeps one accumulator, in units of the current sample's factor:

    at the start of sample b:   acc ← acc · (c_prev / c_b)          at the end:   out = acc · c_last

Floating point is scale-free, so this costs one rounding (2⁻²⁴) a sample whatever the factors' range; it is exact while
|out| / min c stays below the float32 range. Factors with |c_b| < MIN_SCALE, zero and NaN among them, skip the sample:
its rows are never read, so inf and NaN in them never reach the sum. (A sample whose norm is 2¹⁰⁰ times the bound has
overflowed every norm in float32 long before.)

Both operands lie with K outermost ("MN-major"); Hopper's tensor cores take them so, straight from shared memory.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import (
    INTERPRETED,
    dot,
    is_hopper,
    jit,
    launch_on,
    rows_are_aligned,
    tl,
    triton,
    use_triton,
)

MIN_SCALE = 2.0**-100
"""Smaller factors count as zero."""

CHUNK_BYTES = 64 * 2**20
"""The fallback converts and masks this much of an operand at a time."""

_HALF = (torch.bfloat16, torch.float16)
_MAX_SAMPLES = 64  # one launch keeps its samples' "is live" bits in one 64-bit register

SumBackend = Literal["auto", "torch", "triton", "cublas"]


@dataclass(frozen=True)
class SumTiles:
    """How the output is cut. `flat`: one pipelined loop over all samples; otherwise the pipeline refills for each."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    flat: bool = True


def scaled_sum(
    g: Tensor,
    x: Tensor,
    scale: Tensor | None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: SumBackend = "auto",
    tiles: SumTiles | None = None,
) -> Tensor:
    """Σ_b scale_b · G_bᵀX_b: (p, d), float32 for half-precision inputs, otherwise in the inputs' dtype.

    scale=None counts as ones. With `out` (p, d) the result is written there, or added to it if `accumulate`. `tiles`
    forces a configuration (for measurements). backend="cublas" scales the narrower operand in its own dtype and calls
    the library's GEMM: faster to beat than to trust, since it rounds c·g (see above), and it overwrites the rows of
    skipped samples in the wider operand with zeros.
    """
    if g.dim() != 3 or x.dim() != 3 or g.shape[:2] != x.shape[:2]:
        raise ValueError(f"expected g (B, T, p) and x (B, T, d), got {tuple(g.shape)} and {tuple(x.shape)}")
    if scale is not None and scale.shape != g.shape[:1]:
        raise ValueError(f"expected scale of shape {tuple(g.shape[:1])}, got {tuple(scale.shape)}")
    dtype = torch.promote_types(g.dtype, x.dtype)
    dtype = torch.float32 if dtype in _HALF else dtype
    if out is None:
        out, accumulate = torch.empty(g.shape[2], x.shape[2], dtype=dtype, device=g.device), False
    elif out.shape != (g.shape[2], x.shape[2]) or out.dtype != dtype:
        raise ValueError(f"expected out {(g.shape[2], x.shape[2])} {dtype}, got {tuple(out.shape)} {out.dtype}")
    if backend == "cublas" or (scale is None and backend == "auto" and g.is_cuda and g.dtype == x.dtype):
        return _cublas(g, x, scale, out, accumulate)
    served = (
        g.dtype == x.dtype
        and g.dtype in _HALF
        and g.shape[0] > 0
        and g.shape[1] >= 16  # shorter samples leave most of each K block empty
        and out.stride(1) == 1
        and rows_are_aligned(g, x)
        and is_hopper(g.device)
    )
    if use_triton("auto" if backend == "auto" else backend, g.device, served=served, why_not="dtype, T or strides"):
        scale = torch.ones(g.shape[0], dtype=torch.float32, device=g.device) if scale is None else scale
        for first in range(0, g.shape[0], _MAX_SAMPLES):
            part = slice(first, first + _MAX_SAMPLES)
            _launch(g[part], x[part], scale[part].float(), out, accumulate or first > 0, tiles or SumTiles())
        return out
    return _torch(g, x, scale, out, accumulate)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _scaled_sum_kernel(
    g_rows,
    x_rows,
    scale,
    out,
    batch,
    length,
    p,
    d,
    out_stride,
    min_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    MAX_SAMPLES: tl.constexpr,
    FLAT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One program: one BLOCK_M×BLOCK_N tile of out. g_rows, x_rows: descriptors of (B, T, p) and (B, T, d).

    A descriptor gives zeros past its shape: at the end of each sample (T is no multiple of BLOCK_K), and for samples
    that are skipped, which are read at row T.
    """
    program = tl.program_id(0)
    rows = tl.cdiv(p, BLOCK_M)
    width = GROUP_M * tl.cdiv(d, BLOCK_N)  # tiles that run together share rows and columns in L2
    first_m = (program // width) * GROUP_M
    group_m = min(rows - first_m, GROUP_M)
    m = (first_m + (program % width) % group_m) * BLOCK_M
    n = ((program % width) // group_m) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    current = 1.0
    if FLAT:
        # The samples' factors are packed into bits first: a load inside the loop, on which the operands' loads
        # depend, would take its place in the software pipeline.
        lanes = tl.arange(0, MAX_SAMPLES)
        factors = tl.load(scale + lanes, mask=lanes < batch, other=0.0)
        live_bits = tl.sum(tl.where(tl.abs(factors) >= min_scale, 1, 0).to(tl.int64) << lanes.to(tl.int64))
        steps = tl.cdiv(length, BLOCK_K)
        for step in range(batch * steps):
            b = step // steps
            k = (step - b * steps) * BLOCK_K
            live = ((live_bits >> b.to(tl.int64)) & 1) != 0
            if (k == 0) & live:
                factor = tl.load(scale + b)
                acc = acc * (current / factor)
                current = factor
            k = tl.where(live, k, length)
            g_tile = g_rows.load([b, k, m]).reshape(BLOCK_K, BLOCK_M)
            x_tile = x_rows.load([b, k, n]).reshape(BLOCK_K, BLOCK_N)
            acc = dot(g_tile.T, x_tile, acc, "ieee")
    else:
        for b in range(batch):
            factor = tl.load(scale + b)
            live = tl.abs(factor) >= min_scale
            if live:
                acc = acc * (current / factor)
                current = factor
            for k in range(0, tl.where(live, length, 0), BLOCK_K):
                g_tile = g_rows.load([b, k, m]).reshape(BLOCK_K, BLOCK_M)
                x_tile = x_rows.load([b, k, n]).reshape(BLOCK_K, BLOCK_N)
                acc = dot(g_tile.T, x_tile, acc, "ieee")
    acc = acc * current
    i = m + tl.arange(0, BLOCK_M)
    j = n + tl.arange(0, BLOCK_N)
    inside = (i < p)[:, None] & (j < d)[None, :]
    pointers = out + i.to(tl.int64)[:, None] * out_stride + j[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, acc, mask=inside)


def _launch(g: Tensor, x: Tensor, scale: Tensor, out: Tensor, accumulate: bool, tiles: SumTiles) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, length, p = g.shape
    d = x.shape[2]
    with launch_on(g.device):
        _scaled_sum_kernel[(triton.cdiv(p, tiles.block_m) * triton.cdiv(d, tiles.block_n),)](
            TensorDescriptor.from_tensor(g, [1, tiles.block_k, tiles.block_m]),
            TensorDescriptor.from_tensor(x, [1, tiles.block_k, tiles.block_n]),
            scale.contiguous(),
            out,
            batch,
            length,
            p,
            d,
            out.stride(0),
            MIN_SCALE,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            GROUP_M=8,
            MAX_SAMPLES=_MAX_SAMPLES,
            FLAT=tiles.flat,
            ACCUMULATE=accumulate,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


@jit
def _scale_rows_kernel(source, target, scale, sample_size, min_scale, BLOCK: tl.constexpr, CLEAR_ONLY: tl.constexpr):
    """target_b = scale_b · source_b, zeros where the sample is skipped; CLEAR_ONLY: writes the skipped ones alone."""
    b = tl.program_id(1)
    factor = tl.load(scale + b)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = b.to(tl.int64) * sample_size + at
    inside = at < sample_size
    if tl.abs(factor) >= min_scale:
        if not CLEAR_ONLY:
            value = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(target + offset, value.to(target.dtype.element_ty), mask=inside)
    else:
        tl.store(target + offset, tl.zeros((BLOCK,), target.dtype.element_ty), mask=inside)


def _cublas(g: Tensor, x: Tensor, scale: Tensor | None, out: Tensor, accumulate: bool) -> Tensor:
    """The library's GEMM over B·T, with c multiplied into the narrower operand beforehand."""
    if scale is not None:
        g, x = g.contiguous(), x.contiguous()
        narrow, wide = (g, x) if g.shape[2] <= x.shape[2] else (x, g)
        narrow = _scaled_copy(narrow, wide, scale.float().contiguous())
        g, x = (narrow, wide) if g.shape[2] <= x.shape[2] else (wide, narrow)
    left, right = g.reshape(-1, g.shape[2]).T, x.reshape(-1, x.shape[2])
    if g.is_cuda and g.dtype in _HALF:
        try:
            if accumulate:
                return torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
            return torch.mm(left, right, out_dtype=torch.float32, out=out)
        except TypeError:  # torch before 2.8
            product = torch.mm(left, right).float()
            return out.add_(product) if accumulate else out.copy_(product)
    left, right = left.to(out.dtype), right.to(out.dtype)
    return out.addmm_(left, right) if accumulate else torch.mm(left, right, out=out)


def _scaled_copy(narrow: Tensor, wide: Tensor, scale: Tensor) -> Tensor:
    """c∘narrow, and zeros written over skipped samples in `wide`."""
    if triton is None or not (narrow.is_cuda or INTERPRETED):
        live = (scale.abs() >= MIN_SCALE)[:, None, None]
        wide.masked_fill_(~live, 0)
        return torch.where(live, narrow * scale[:, None, None], 0).to(narrow.dtype)
    scaled = torch.empty_like(narrow)
    with launch_on(narrow.device):
        for source, target, clear_only in ((narrow, scaled, False), (wide, wide, True)):
            size = source.shape[1] * source.shape[2]
            _scale_rows_kernel[(triton.cdiv(size, 4096), source.shape[0])](
                source, target, scale, size, MIN_SCALE, BLOCK=4096, CLEAR_ONLY=clear_only, num_warps=8
            )
    return scaled


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(g: Tensor, x: Tensor, scale: Tensor | None, out: Tensor, accumulate: bool) -> Tensor:
    """A few samples at a time: mask both operands where the sample is skipped, scale one, multiply."""
    if not accumulate:
        out.zero_()
    if g.shape[:2].numel() == 0:
        return out
    if scale is None:
        scale = torch.ones(g.shape[0], device=g.device)
    factors = scale.to(out.dtype)[:, None, None]
    live = (scale.abs() >= MIN_SCALE)[:, None, None]
    zero = torch.zeros((), dtype=out.dtype, device=g.device)
    samples = max(1, CHUNK_BYTES // (g.shape[1] * max(g.shape[2], x.shape[2], 1) * out.dtype.itemsize))
    for first in range(0, g.shape[0], samples):
        part = slice(first, first + samples)
        left = torch.where(live[part], g[part].to(out.dtype) * factors[part], zero)
        right = torch.where(live[part], x[part].to(out.dtype), zero)
        out.addmm_(left.reshape(-1, g.shape[2]).T, right.reshape(-1, x.shape[2]))
    return out

"""Per-sample gradients of biases and LayerNorms: sums over positions, each operand read once.

    bias:       dbias_b  = Σ_t g_bt                                        g: (B, T, p)
    LayerNorm:  dgamma_b = Σ_t g_bt · (x_bt - mean_bt) · rstd_bt,  dbeta_b = Σ_t g_bt
                                                                        g, x: (B, T, d); mean, rstd: (B, T)

A program sums ROWS positions of BLOCK features of one sample and writes one float32 row; a second pass adds the rows of
a sample. Both orders are fixed by the shapes, so results are deterministic. No full-size temporary is made. Biases
whose g are still there when all layers are through have their sums taken together: one launch for g of equal shapes.
The second pass of norm layers may wait for that, too.

Accumulation: float32 for half types and float32, whatever mix of dtypes comes in; float64 (always by the fallback) if
any operand is float64. Guarantee: a sample's row depends on that sample's positions alone.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import or_

import torch
from torch import Tensor

from dpscope.flash.kernels.tensor_lists import alike, pointer_at, seen_of
from dpscope.flash.kernels.triton_runtime import (
    TRITON_DTYPES,
    Backend,
    jit,
    launch,
    slices,
    table_on,
    tl,
    use_triton,
)
from dpscope.vocabulary.components import PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import CLIPPING, Launch, allocates, announce

ROWS = 128
"""Positions a program sums: fixed, so that one long sample is many programs and the order of addition never varies."""

MOST_STRETCHES = 8
"""Rows of a sample that may wait for the second pass: of more the memory is worth more than a launch."""


LONGEST_AT_ONCE, SUM_PARTS = 256, 16
"""Positions up to which torch's sum takes no scratch memory, and in how many parts it takes longer samples."""


def bias_sums(g: Tensor) -> Tensor:
    """Return Σ_t g, (B, T, p) -> (B, p), by torch: 16 to 50 µs on an H200, where a kernel took 81 (2026-11-16).

    Long samples are summed part by part: at once, torch's sum of (8, 1024, 2048) took 134 MB of scratch memory there.
    """
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    if not g.is_cuda or g.shape[1] <= LONGEST_AT_ONCE:
        return g.sum(1, dtype=dtype)
    parts = math.gcd(g.shape[1], SUM_PARTS)
    return g.reshape(g.shape[0], parts, -1, g.shape[2]).sum(2, dtype=dtype).sum(1)


@allocates(PER_SAMPLE_GRADIENTS, "aten::empty")
def many_bias_sums(gs: Sequence[Tensor], *, backend: Backend = "auto") -> list[Tensor]:
    """Return `bias_sums` of each g: (B, T, p). Those of equal shape, stride and dtype share a launch."""
    groups = alike(zip(seen_of(gs), map(Tensor.get_device, gs), strict=True))
    found: list[Tensor] = list(gs)
    launches: list[tuple[list[Tensor], Tensor]] = []
    for ((shape, stride, dtype), _), members in groups.items():
        device = gs[members[0]].device
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums = torch.empty((len(members), shape[0], shape[2]), dtype=wide, device=device)
        served = dtype in TRITON_DTYPES and 0 not in shape and stride[2] == 1
        why_not = "float64, empty, or features that are apart"
        by_kernel = use_triton(backend, device, served=served, why_not=why_not)
        if by_kernel:
            launches.append(([gs[i] for i in members], sums))
        for index, out in zip(members, sums.unbind(0), strict=True):
            found[index] = out
            if not by_kernel:
                torch.sum(gs[index], 1, dtype=wide, out=out)
    for device in dict.fromkeys(sums.device for _, sums in launches):
        _launch_many([each for each in launches if each[1].device == device])
    return found


def layer_norm_sums(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, whole: bool = True, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (dgamma, dbeta), each (B, d), of a LayerNorm with input x and statistics mean and rstd.

    The statistics have B·T elements, in any shape. Unless `whole`, sums may be (B, stretches, d); `many_bias_sums`
    adds those up.
    """
    shape = g.shape
    if len(shape) != 3 or x.shape != shape:
        raise ValueError(f"expected (B, T, features) twice, got {tuple(shape)} and {tuple(x.shape)}")
    count = shape[0] * shape[1]
    if rstd.numel() != count or mean.numel() != count:
        raise ValueError(f"expected statistics of {tuple(shape[:2])} elements")
    dtypes = {g.dtype, x.dtype, rstd.dtype, mean.dtype}
    served = dtypes <= TRITON_DTYPES.keys() and 0 not in shape
    if use_triton(backend, g.device, served=served, why_not="float64 or empty input"):
        dgamma, dbeta = _launch(g, x, mean, rstd, whole)
    else:
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        dgamma, dbeta = _torch(g, x, mean.reshape(shape[:2]), rstd.reshape(shape[:2]), dtype)
    return dgamma, dbeta


def added_up(parts: Tensor, whole: bool) -> Tensor:
    """Return sums (stretches, ..., B, d) as (..., B, d), or few of them as (..., B, stretches, d) unless `whole`."""
    if len(parts) == 1:
        return parts[0]
    return parts.sum(0) if whole or len(parts) > MOST_STRETCHES else parts.movedim(0, -2)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _sums_kernel(
    g,
    x,
    mean,
    rstd,
    partials,
    length,
    width,
    g_stride_b,
    g_stride_t,
    x_stride_b,
    x_stride_t,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one (b, row block, feature block). partials: (row blocks, 2, B, width) float32, gamma's before beta's."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    f = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    gamma_sum = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    beta_sum = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    for start in range(0, min(ROWS, length - first), BLOCK_T):
        t = first + start + tl.arange(0, BLOCK_T)
        inside = (t < length)[:, None] & (f < width)[None, :]
        rows = t.to(tl.int64)[:, None]
        g_tile = tl.load(g + b * g_stride_b + rows * g_stride_t + f[None, :], mask=inside, other=0.0).to(tl.float32)
        x_tile = tl.load(x + b * x_stride_b + rows * x_stride_t + f[None, :], mask=inside, other=0.0).to(tl.float32)
        beta_sum += g_tile
        x_tile -= tl.load(mean + b * length + t, mask=t < length, other=0.0).to(tl.float32)[:, None]
        scale = tl.load(rstd + b * length + t, mask=t < length, other=0.0).to(tl.float32)
        gamma_sum += tl.where(inside, g_tile * x_tile * scale[:, None], 0.0)
    at = (2 * tl.program_id(1) * tl.num_programs(0) + b) * width + f
    tl.store(partials + at, tl.sum(gamma_sum, axis=0), mask=f < width)
    at += tl.num_programs(0).to(tl.int64) * width
    tl.store(partials + at, tl.sum(beta_sum, axis=0), mask=f < width)


def _launch(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, whole: bool) -> tuple[Tensor, ...]:
    batch, length, width = g.shape
    g, x = (each if each.stride(2) == 1 else each.contiguous() for each in (g, x))
    blocks = -(-length // ROWS)
    block = min(256, 1 << (width - 1).bit_length())
    partials = torch.empty((blocks, 2, batch, width), dtype=torch.float32, device=g.device)
    arguments = (g, x, mean.contiguous(), rstd.contiguous(), partials, length, width, *g.stride()[:2], *x.stride()[:2])
    constants = {"ROWS": ROWS, "BLOCK_T": 8, "BLOCK": block, "num_warps": 4, "num_stages": 3}
    launch(_sums_kernel, (batch, blocks, -(-width // block)), arguments, constants, specialised=True)
    name = _sums_kernel.__name__
    announce(partial(Launch, name=name, family=CLIPPING, reads=[g, x, mean, rstd], writes=[partials]))
    return added_up(partials, whole).unbind(0)


@partial(jit, do_not_specialize=("batch",))
def _bias_sums_kernel(
    table,
    partials,
    batch,
    length,
    width,
    stride_b,
    stride_t,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one (layer · B + b, row block, feature block). table: pointers; partials: (row blocks, layers, B, width)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    f = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    g = pointer_at(table + row // batch, DTYPE, ALIGNED) + (row % batch) * stride_b
    sums = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    for start in range(0, min(ROWS, length - first), BLOCK_T):
        t = first + start + tl.arange(0, BLOCK_T)
        inside = (t < length)[:, None] & (f < width)[None, :]
        sums += tl.load(g + t.to(tl.int64)[:, None] * stride_t + f[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (tl.program_id(1) * tl.num_programs(0) + row) * width + f
    tl.store(partials + at, tl.sum(sums, axis=0), mask=f < width)


def _launch_many(groups: list[tuple[list[Tensor], Tensor]]) -> None:
    """Sum g of equal shapes, strides and dtypes into (layers, B, p): a launch each, one table for all."""
    device = groups[0][1].device
    pointers = [list(map(Tensor.data_ptr, gs)) for gs, _ in groups]
    for (gs, sums), own, table in zip(groups, pointers, table_on(device, *pointers), strict=True):
        first = gs[0]
        batch, length, width = first.shape
        blocks, block = -(-length // ROWS), min(256, 1 << (width - 1).bit_length())
        partials = sums if blocks == 1 else torch.empty((blocks, *sums.shape), dtype=torch.float32, device=device)
        constants = {"DTYPE": TRITON_DTYPES[first.dtype], "ALIGNED": reduce(or_, own) % 16 == 0, "ROWS": ROWS}
        constants |= {"BLOCK_T": 8, "BLOCK": block, "num_warps": 4, "num_stages": 3}
        arguments = (table, partials, batch, length, width, *first.stride()[:2])
        grid = len(gs) * batch, blocks, -(-width // block)
        launch(_bias_sums_kernel, grid, arguments, constants, specialised=True)
        announce(partial(Launch, name=_bias_sums_kernel.__name__, family=CLIPPING, reads=gs, writes=[partials]))
        if blocks > 1:
            torch.sum(partials, 0, out=sums)


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    batch, length, width = g.shape
    dgamma = torch.zeros(batch, width, dtype=dtype, device=g.device)
    for rows in slices(length, batch * width * dtype.itemsize):
        part = (slice(None), rows)
        normal = x[part].to(dtype) - mean[part].to(dtype).unsqueeze(-1)
        dgamma += (normal * rstd[part].to(dtype).unsqueeze(-1)).mul_(g[part]).sum(dim=1)
    return dgamma, g.sum(dim=1, dtype=dtype)

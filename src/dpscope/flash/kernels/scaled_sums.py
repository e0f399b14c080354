"""The clipped sums of many weights in one launch.

    out_i = Σ_b c_b G_{i,b}ᵀ X_{i,b}        for every weight i;  g_i: (B, T, p_i), x_i: (B, T, d_i), out_i: (p_i, d_i)

The mathematics, and the reason why c_b is applied in the float32 accumulator, are those of `scaled_sum`. All weights of
one launch share B, T, dtype and the factors; a table holds their pointers, widths and strides, and a program finds its
weight in it. One launch costs the host what one layer alone would, and the last wave of a layer's tiles is filled with
the next layer's.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dpscope.flash.kernels.scaled_sum import MIN_SCALE, scaled_sum
from dpscope.flash.kernels.triton_runtime import (
    TRITON_DTYPES,
    Backend,
    dot,
    is_hopper,
    jit,
    launch_on,
    provide_scratch,
    rows_are_aligned,
    table_on,
    tl,
    use_triton,
)

_HALF = (torch.bfloat16, torch.float16)
_MAX_SAMPLES = 64  # one launch keeps its samples' "is live" bits in one 64-bit register
_COLUMNS = 10  # of the table


@dataclass(frozen=True)
class GroupTiles:
    """Measured on an H200: two programs of four warps share a multiprocessor and hide each other's ends."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3


def scaled_sums(
    gs: Sequence[Tensor],
    xs: Sequence[Tensor],
    scale: Tensor,
    *,
    outs: Sequence[Tensor | None] | None = None,
    backend: Backend = "auto",
    tiles: GroupTiles | None = None,
) -> list[Tensor]:
    """Σ_b scale_b · G_bᵀX_b of every pair: float32 for half-precision inputs. Sums are added to an `out` where given.

    Pairs the kernel does not serve are summed one by one.
    """
    outs = outs or [None] * len(gs)
    served = [_is_served(g, x, out) for g, x, out in zip(gs, xs, outs, strict=True)]
    results: list[Tensor | None] = [None] * len(gs)
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        if use_triton(backend, g.device, served=served[i], why_not="dtype, T or strides"):
            groups.setdefault((g.shape[:2], g.dtype), []).append(i)
        else:
            results[i] = scaled_sum(g, x, scale, out=outs[i], accumulate=outs[i] is not None)
    for members in groups.values():
        summed = _launch_group(
            [gs[i] for i in members], [xs[i] for i in members], scale, [outs[i] for i in members], tiles or GroupTiles()
        )
        for i, result in zip(members, summed, strict=True):
            results[i] = result
    return [result for result in results if result is not None]


def _is_served(g: Tensor, x: Tensor, out: Tensor | None) -> bool:
    return (
        g.dtype == x.dtype
        and g.dtype in _HALF
        and g.shape[0] > 0
        and g.shape[1] >= 16  # shorter samples leave most of each K block empty
        and (out is None or (out.is_contiguous() and out.dtype == torch.float32))
        and rows_are_aligned(g, x)
        and is_hopper(g.device)
    )


@jit
def _scaled_sums_kernel(
    tile_starts,
    table,
    scale,
    n_weights,
    search_steps,
    batch,
    length,
    min_scale,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    MAX_SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: one BLOCK_M×BLOCK_N tile of one weight. table: (weights, COLUMNS)."""
    program = tl.program_id(0)
    low = n_weights * 0
    high = n_weights
    for _ in range(search_steps):
        middle = (low + high) // 2
        below = tl.load(tile_starts + middle) <= program
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    entry = table + low * COLUMNS
    tile = program - tl.load(tile_starts + low).to(tl.int32)
    p = tl.load(entry + 3).to(tl.int32)
    d = tl.load(entry + 4).to(tl.int32)
    # Descriptors give zeros past their shape: at the end of each sample, and for samples that are skipped.
    g_rows = tl.make_tensor_descriptor(
        tl.load(entry).to(tl.pointer_type(DTYPE)),
        [batch, length, p],
        [tl.load(entry + 5), tl.load(entry + 6), 1],
        [1, BLOCK_K, BLOCK_M],
    )
    x_rows = tl.make_tensor_descriptor(
        tl.load(entry + 1).to(tl.pointer_type(DTYPE)),
        [batch, length, d],
        [tl.load(entry + 7), tl.load(entry + 8), 1],
        [1, BLOCK_K, BLOCK_N],
    )
    rows = tl.cdiv(p, BLOCK_M)
    width = GROUP_M * tl.cdiv(d, BLOCK_N)  # tiles that run together share rows and columns in L2
    first_m = (tile // width) * GROUP_M
    group_m = min(rows - first_m, GROUP_M)
    m = (first_m + (tile % width) % group_m) * BLOCK_M
    n = ((tile % width) // group_m) * BLOCK_N
    # The samples' factors are packed into bits first: a load inside the loop, on which the operands' loads depend,
    # would take its place in the software pipeline.
    lanes = tl.arange(0, MAX_SAMPLES)
    factors = tl.load(scale + lanes, mask=lanes < batch, other=0.0)
    live_bits = tl.sum(tl.where(tl.abs(factors) >= min_scale, 1, 0).to(tl.int64) << lanes.to(tl.int64))
    steps = tl.cdiv(length, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    current = 1.0
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
    acc = acc * current
    i = m + tl.arange(0, BLOCK_M)
    j = n + tl.arange(0, BLOCK_N)
    inside = (i < p)[:, None] & (j < d)[None, :]
    pointers = tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + i.to(tl.int64)[:, None] * d + j[None, :]
    if tl.load(entry + 9) != 0:
        acc += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, acc, mask=inside)


def _launch_group(
    gs: Sequence[Tensor], xs: Sequence[Tensor], scale: Tensor, outs: Sequence[Tensor | None], tiles: GroupTiles
) -> list[Tensor]:
    device = gs[0].device
    batch, length, _ = gs[0].shape
    results = [
        torch.empty(g.shape[2], x.shape[2], dtype=torch.float32, device=device) if out is None else out
        for g, x, out in zip(gs, xs, outs, strict=True)
    ]
    counts = [
        -(-g.shape[2] // tiles.block_m) * -(-x.shape[2] // tiles.block_n) for g, x in zip(gs, xs, strict=True)
    ]
    starts = [0, *accumulate(counts)]
    scale = scale.float().contiguous()
    provide_scratch(device)
    with launch_on(device):
        for first in range(0, batch, _MAX_SAMPLES):
            rows: list[int] = []
            for g, x, out, result in zip(gs, xs, outs, results, strict=True):
                (gb, gt, _), (xb, xt, _) = g.stride(), x.stride()
                size = g.element_size()
                rows += (g.data_ptr() + first * gb * size, x.data_ptr() + first * xb * size, result.data_ptr())
                rows += (g.shape[2], x.shape[2], gb, gt, xb, xt, int(out is not None or first > 0))
            tile_starts, table = table_on(device, starts, rows)
            _scaled_sums_kernel[(starts[-1],)](
                tile_starts,
                table,
                scale[first:],
                len(gs),
                len(gs).bit_length(),
                min(batch - first, _MAX_SAMPLES),
                length,
                MIN_SCALE,
                DTYPE=TRITON_DTYPES[gs[0].dtype],
                BLOCK_M=tiles.block_m,
                BLOCK_N=tiles.block_n,
                BLOCK_K=tiles.block_k,
                GROUP_M=8,
                MAX_SAMPLES=_MAX_SAMPLES,
                COLUMNS=_COLUMNS,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
    return results

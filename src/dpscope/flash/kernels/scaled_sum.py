"""The clipped sums of per-sample weight gradients: one GEMM a weight, all weights of one shape in one launch.

    out = Σ_b c_b G_bᵀX_b,      g: (B, T, p), x: (B, T, d), scale c: (B,) float32, out: (p, d)

The factor is applied in the float32 accumulator. Rounding c_b·g to bfloat16 instead would put an error of 2⁻⁹ on every
position, which need not cancel where the positions' gradients do: a sample could exceed its bound. Here c_b multiplies
the sample's whole gradient, exactly as the norm saw it.

The kernel walks K = B·T sample by sample and keeps one accumulator, in units of the current sample's factor:

    at the end of sample b:   acc ← acc · (c_b / c_{b+1})           at the end:   out = acc · c_last

Floating point is scale-free, so this costs one rounding (2⁻²⁴) a sample whatever the factors' range; it is exact while
|out| / min c stays below the float32 range. Factors with |c_b| < MIN_SCALE, zero and NaN among them, skip the sample:
its rows are never read, so inf and NaN in them never reach the sum. (Such a sample is counted as not finite.)

Where torch makes the products (float32, GPUs before Ampere) and the user lets it round their operands (TF32), the same
holds: c_b·g is not what may be rounded. Each sample's product is made as the norms saw it, and summed with its factor.

The rescaling stands after the multiplication, under a condition. Before it, the accumulator would reach the tensor
cores through that condition in every step, and the compiler would wait for each multiplication before the next.

Both operands lie with K outermost ("MN-major"); Hopper's tensor cores take them so, straight from shared memory. Cards
without its copy engine load through pointers, in smaller steps.

Weights of equal shapes and strides share a launch: a program finds its weight by one division, and only three pointers
and the place of its factors come from a table. Tensor descriptors are made on the device; making them on the host costs
more than the launch itself.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import chain
from operator import or_

import torch
from torch import Tensor

from dpscope.flash.kernels.float32_products import TF32_ROUNDING, operand_rounding
from dpscope.flash.kernels.kept_gradients import kept_sums
from dpscope.flash.kernels.tensor_lists import alike, seen_of
from dpscope.flash.kernels.triton_runtime import (
    TRITON_DTYPES,
    Backend,
    dot,
    is_hopper,
    jit,
    launch,
    multiplies_halves,
    provide_scratch,
    rows_are_aligned,
    slices,
    stages_that_fit,
    table_on,
    tl,
    use_triton,
    with_aligned_rows,
)
from dpscope.vocabulary.components import GRADIENTS
from dpscope.vocabulary.phases import GEMM, Launch, allocates, announce

MIN_SCALE = 2.0**-100
"""Smaller factors count as zero."""


TOGETHER_BYTES = 2**25
"""Sums that share an allocation: large ones have to fit into the gaps that backward left in memory."""

_HALF = (torch.bfloat16, torch.float16)
_MAX_SAMPLES = 64  # one launch keeps its samples' "is live" bits in one 64-bit register
_GROUP_M = 8  # tiles of this many rows run together and share columns in L2


@dataclass(frozen=True)
class SumTiles:
    """Tiles of the outputs, and the number of steps of K in flight.

    Measured on an H200 (2026-11-15, torch 2.11, triton 3.6): milliseconds on the device for all Linear weights and the
    head of preset 1b, bfloat16. The default comes first after the ideal; a fourth stage is a tie and takes more memory.

                                 B=8 T=1024   B=16 T=1024   B=16 T=256   B=32 T=256
        cuBLAS, no factors            22.60         45.78        11.72        22.50
        128x256x64 8w 3st             23.73         49.29        13.36        25.59
        128x256x64 8w 4st             23.89         49.41        13.22        25.33
        256x128x64 8w 4st             24.64         51.71        13.57        26.30
        128x128x64 4w 3st             27.09         55.13        14.42        28.04

    benchmarks/results/2026-11-15-h200-scaled-sum.md has the other loops that were tried, all slower than the default.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = True


WITHOUT_TMA = SumTiles(block_k=32, num_stages=4, tma=False)
"""Not measured. Compiled for Ampere and Ada it takes 56 KiB of shared memory, and spills no register."""
_NARROW = SumTiles(block_n=128, num_warps=4)
_WORTH_SHORTER_STEPS = 0.95  # of the steps' positions: shorter steps take 1 to 2 % more where they save none


def default_tiles(length: int, d: int, device: torch.device) -> SumTiles:
    """Return the tile for samples of `length` positions and inputs of d features.

    Inputs of at most 128 features would leave half of the usual tile empty, or more: they get one of half the width. On
    an H200 that takes 15 to 48 % off for d ≤ 128; from d = 136 on the usual tile is faster (2026-11-15).

    A sample ends with a whole step: 197 positions are four steps of 64, or seven of 32. On an H200 the shorter ones
    take 8 to 15 % off at lengths of 136, 197 and 208, and add 1 to 2 % at 256 and 568 (2026-11-16).
    """
    if not is_hopper(device):
        return WITHOUT_TMA if d > _NARROW.block_n else replace(WITHOUT_TMA, block_n=_NARROW.block_n)
    tiles = _NARROW if d <= _NARROW.block_n else SumTiles()
    long, short = (-(-length // step) * step for step in (tiles.block_k, tiles.block_k // 2))
    if short > _WORTH_SHORTER_STEPS * long:
        return tiles
    return replace(tiles, block_k=tiles.block_k // 2, num_stages=2 * tiles.num_stages)


def scaled_sums(
    gs: Sequence[Tensor],
    xs: Sequence[Tensor],
    scale: Tensor,
    *,
    rows: Sequence[int] = (),
    outs: Sequence[Tensor | None] | None = None,
    let_go_together: bool = False,
    backend: Backend = "auto",
    tiles: SumTiles | None = None,
) -> list[Tensor]:
    """Return Σ_b scale_b · G_bᵀX_b of every pair, (p, d): float32 for half-precision inputs, else the inputs' dtype.

    scale: (B,), or (G, B); then `rows` says which row is each pair's. Sums are added to an `out` if given; no two may
    be the same tensor. `let_go_together`: the caller keeps none of the others longer, so that they may share memory.
    `tiles` forces a configuration (for measurements).
    """
    given, rows = outs or [None] * len(gs), rows or [0] * len(gs)
    scale = scale if scale.dim() == 2 else scale.unsqueeze(0)
    # Pairs of one key share their checks and a launch: what is left for each pair is a few integers.
    targets = [None if out is None else (out.shape, out.stride(), out.dtype) for out in given]
    groups = alike(zip(*map(seen_of, (gs, xs)), targets, strict=True))
    results: dict[int, Tensor] = {}
    launches: list[_SumGroup] = []
    for members in groups.values():
        if backend != "torch" and _lacks_alignment(gs[members[0]], xs[members[0]]):
            for i in members:
                results[i] = _sum_of_aligned(gs[i], xs[i], scale[rows[i]], given[i], backend, tiles)
            continue
        given_here = [out for i in members if (out := given[i]) is not None]
        own_rows = [rows[i] for i in members]
        group = _SumGroup([gs[i] for i in members], [xs[i] for i in members], own_rows, given_here, bool(given_here))
        group.check_outs(scale, let_go_together)
        results.update(zip(members, group.outs, strict=True))
        if use_triton(backend, group.gs[0].device, served=group.is_served(), why_not="dtype, T or strides"):
            launches.append(group)
        else:
            for g, x, row, out in zip(group.gs, group.xs, group.rows, group.outs, strict=True):
                _torch(g, x, scale[row], out, group.add)
    if launches:
        _launch(launches, scale, tiles)
        announce(lambda: _described(launches, scale))
    return [results[i] for i in range(len(gs))]


@dataclass
class _SumGroup:
    """Pairs of equal shapes, strides and dtypes, and what their sums are written to, or added to."""

    gs: list[Tensor]
    xs: list[Tensor]
    rows: list[int]  # of the factors
    outs: list[Tensor]
    add: bool

    def check_outs(self, scale: Tensor, let_go_together: bool) -> None:
        """Check shapes; make `outs` where none are given."""
        g, x = self.gs[0], self.xs[0]
        if g.dim() != 3 or x.dim() != 3 or g.shape[:2] != x.shape[:2]:
            raise ValueError(f"expected g (B, T, p) and x (B, T, d), got {tuple(g.shape)} and {tuple(x.shape)}")
        if scale.shape[1] != g.shape[0]:
            raise ValueError(f"expected scale for {g.shape[0]} samples, got it for {scale.shape[1]}")
        dtype = torch.promote_types(g.dtype, x.dtype)
        dtype = torch.float32 if dtype in _HALF else dtype
        shape = (g.shape[2], x.shape[2])
        if not self.add:
            self.outs = _fresh(len(self.gs), shape, dtype, g.device, let_go_together)
        elif self.outs[0].shape != shape or self.outs[0].dtype != dtype:
            raise ValueError(f"expected out {shape} {dtype}, got {tuple(self.outs[0].shape)} {self.outs[0].dtype}")

    @cached_property
    def pointers(self) -> list[list[int]]:
        return [list(map(Tensor.data_ptr, column)) for column in (self.gs, self.xs, self.outs)]

    def is_served(self) -> bool:
        """Return whether the kernel serves the group: half precision, aligned rows, at least 16 positions."""
        g, x, out = self.gs[0], self.xs[0], self.outs[0]
        return (
            g.dtype == x.dtype
            and g.dtype in _HALF
            and g.shape[0] > 0
            and g.shape[1] >= 16
            and out.stride(1) == 1
            and out.stride(0) % 4 == 0
            and rows_are_aligned(g, x)
            and multiplies_halves(g.device)
            and reduce(or_, chain(*self.pointers)) % 16 == 0
        )

    def table(self, start: int) -> list[int]:
        """Return pointers to g, x and out of every pair, from sample `start` on, and the place of its first factor."""
        g_skip, x_skip = (start * each.stride(0) * each.element_size() for each in (self.gs[0], self.xs[0]))
        samples = self.gs[0].shape[0]
        firsts = [row * samples + start for row in self.rows]
        pairs = zip(*self.pointers, firsts, strict=True)
        return [n for g, x, out, first in pairs for n in (g + g_skip, x + x_skip, out, first)]


@allocates(GRADIENTS, "aten::empty")
def _fresh(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, let_go_together: bool
) -> list[Tensor]:
    """Allocate tensors for sums: many in one allocation if they may share memory and it stays small."""
    size = shape[0] * shape[1] * dtype.itemsize
    at_once = TOGETHER_BYTES // size if let_go_together and size and size % 16 == 0 else 0
    if at_once < 2:
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
    made: list[Tensor] = []
    while len(made) < count:
        made += torch.empty((min(at_once, count - len(made)), *shape), dtype=dtype, device=device).unbind(0)
    return made


def _lacks_alignment(g: Tensor, x: Tensor) -> bool:
    """Return True if only the alignment of rows keeps the kernel from serving the pair.

    Examples: a width that is no multiple of a 16-byte word, and the gradient of logits in a (B, classes, T) loss.
    """
    if g.dim() != 3 or x.dim() != 3 or g.dtype != x.dtype or g.dtype not in _HALF:
        return False
    odd = x.shape[2] % 8 or not rows_are_aligned(g, x)
    return bool(odd) and g.shape[0] > 0 and g.shape[1] >= 16 and multiplies_halves(g.device)


@allocates(GRADIENTS, "aten::clone")
def _sum_of_aligned(
    g: Tensor, x: Tensor, scale: Tensor, out: Tensor | None, backend: Backend, tiles: SumTiles | None
) -> Tensor:
    """Sum over copies that are padded with zeros to whole words in a row, and cut the padding off the result."""
    width = x.shape[2]
    if not rows_are_aligned(g):
        g = with_aligned_rows(g)[..., : g.shape[2]]
    if width % 8 or not rows_are_aligned(x):
        x = with_aligned_rows(x)
    (total,) = scaled_sums([g], [x], scale, backend=backend, tiles=tiles)
    total = total[:, :width].contiguous()
    return total if out is None else out.add_(total)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _next_factor(scale, b, batch, min_scale, current):
    """Return the factor of sample b + 1, or `current` if that sample is skipped or does not exist."""
    factor = tl.load(scale + b + 1, mask=b + 1 < batch, other=0.0)
    return tl.where(tl.abs(factor) >= min_scale, factor, current)


@jit
def _load(rows, b, row, first, length, width, stride_b, stride_t, K: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr):
    """Return K rows of sample b, N features from `first` on; zeros past the sample's length and width."""
    if TMA:
        tile = rows.load([b, row, first]).reshape(K, N)
    else:
        t, i = row + tl.arange(0, K), first + tl.arange(0, N)
        places = rows + b.to(tl.int64) * stride_b + t.to(tl.int64)[:, None] * stride_t + i[None, :]
        tile = tl.load(places, mask=(t < length)[:, None] & (i < width)[None, :], other=0.0)
    return tile


@jit
def _tile_sum(
    g_rows, x_rows, scale, live_bits, m, n, batch, length, p, d, g_stride_b, g_stride_t, x_stride_b, x_stride_t,
    min_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return Σ_b c_b G_bᵀX_b for rows [m, m+BLOCK_M) and columns [n, n+BLOCK_N), float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    current = _next_factor(scale, -1, batch, min_scale, 1.0)
    b = batch * 0
    k = batch * 0
    # One loop over all samples: a loop for each would drain and refill the pipeline between them.
    for _ in range(batch * tl.cdiv(length, BLOCK_K)):
        live = ((live_bits >> b) & 1) != 0
        row = tl.where(live, k, length)
        g_tile = _load(g_rows, b, row, m, length, p, g_stride_b, g_stride_t, BLOCK_K, BLOCK_M, TMA)
        x_tile = _load(x_rows, b, row, n, length, d, x_stride_b, x_stride_t, BLOCK_K, BLOCK_N, TMA)
        acc = dot(g_tile.T, x_tile, acc, "ieee")
        last = k + BLOCK_K >= length
        if last:
            following = _next_factor(scale, b, batch, min_scale, current)
            acc = acc * (current / following)
            current = following
        b = tl.where(last, b + 1, b)
        k = tl.where(last, 0, k + BLOCK_K)
    return acc * current


@jit
def _place(tile, p, d, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the first row and column of a tile; tiles that run together share rows and columns in L2."""
    rows = tl.cdiv(p, BLOCK_M)
    width = GROUP_M * tl.cdiv(d, BLOCK_N)
    first = (tile // width) * GROUP_M
    height = min(rows - first, GROUP_M)
    return (first + (tile % width) % height) * BLOCK_M, ((tile % width) // height) * BLOCK_N


@partial(jit, do_not_specialize=("batch", "tiles_each"))  # batches of any size share one compiled kernel
def _scaled_sum_kernel(
    table,
    scale,
    batch,
    length,
    p,
    d,
    g_stride_b,
    g_stride_t,
    x_stride_b,
    x_stride_t,
    out_stride,
    tiles_each,
    min_scale,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    MAX_SAMPLES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute one tile of one weight per program. table: (weights, 4) pointers to g, x and out, first factor."""
    pointers = table + (tl.program_id(0) // tiles_each) * 4
    scale += tl.load(pointers + 3)
    m, n = _place(tl.program_id(0) % tiles_each, p, d, BLOCK_M, BLOCK_N, GROUP_M)
    # Descriptors give zeros past their shape: at the end of each sample, where T is no multiple of BLOCK_K, and for
    # samples that are skipped, which are read at row T.
    g_rows = tl.multiple_of(tl.load(pointers).to(tl.pointer_type(DTYPE)), 16)
    x_rows = tl.multiple_of(tl.load(pointers + 1).to(tl.pointer_type(DTYPE)), 16)
    if TMA:
        g_rows = tl.make_tensor_descriptor(
            g_rows, [batch, length, p], [g_stride_b, g_stride_t, 1], [1, BLOCK_K, BLOCK_M]
        )
        x_rows = tl.make_tensor_descriptor(
            x_rows, [batch, length, d], [x_stride_b, x_stride_t, 1], [1, BLOCK_K, BLOCK_N]
        )
    else:  # rows begin on 16-byte words, which asynchronous copies need to know
        g_stride_b, g_stride_t = tl.multiple_of(g_stride_b, 8), tl.multiple_of(g_stride_t, 8)
        x_stride_b, x_stride_t = tl.multiple_of(x_stride_b, 8), tl.multiple_of(x_stride_t, 8)
    # Which samples are live is packed into bits first: a load inside the loop, on which the operands' loads depend,
    # would take its place in the software pipeline.
    lanes = tl.arange(0, MAX_SAMPLES)
    factors = tl.load(scale + lanes, mask=lanes < batch, other=0.0)
    live_bits = tl.sum(tl.where(tl.abs(factors) >= min_scale, 1, 0).to(tl.int64) << lanes.to(tl.int64))
    acc = _tile_sum(
        g_rows, x_rows, scale, live_bits, m, n, batch, length, p, d, g_stride_b, g_stride_t, x_stride_b, x_stride_t,
        min_scale, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
    )  # fmt: skip
    out = tl.multiple_of(tl.load(pointers + 2).to(tl.pointer_type(tl.float32)), 16)
    i = m + tl.arange(0, BLOCK_M)
    j = n + tl.arange(0, BLOCK_N)
    inside = (i < p)[:, None] & (j < d)[None, :]
    places = out + i.to(tl.int64)[:, None] * out_stride + j[None, :]
    if ACCUMULATE:
        acc += tl.load(places, mask=inside, other=0.0)
    tl.store(places, acc, mask=inside)


def _launch(groups: list[_SumGroup], scale: Tensor, forced: SumTiles | None) -> None:
    """Launch once for each group and at most _MAX_SAMPLES samples, with one table for all."""
    device = groups[0].gs[0].device
    scale = scale.float().contiguous()
    parts = [(group, start) for group in groups for start in range(0, scale.shape[1], _MAX_SAMPLES)]
    tables = table_on(device, *(group.table(start) for group, start in parts))
    for (group, start), table in zip(parts, tables, strict=True):
        g, x = group.gs[0], group.xs[0]
        (batch, length, p), d = g.shape, x.shape[2]
        tiles = forced or default_tiles(length, d, device)
        if tiles.tma:
            provide_scratch(device)
        step = (tiles.block_m + tiles.block_n) * tiles.block_k * g.element_size()
        tiles_each = -(-p // tiles.block_m) * -(-d // tiles.block_n)
        sizes = min(batch - start, _MAX_SAMPLES), length, p, d
        strides = *g.stride()[:2], *x.stride()[:2], group.outs[0].stride(0)
        constants = {"DTYPE": TRITON_DTYPES[g.dtype], "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
        constants |= {"BLOCK_K": tiles.block_k, "GROUP_M": _GROUP_M, "MAX_SAMPLES": _MAX_SAMPLES}
        constants |= {"ACCUMULATE": group.add or start > 0, "TMA": tiles.tma, "num_warps": tiles.num_warps}
        constants["num_stages"] = stages_that_fit(tiles.num_stages, step, device)
        arguments = (table, scale, *sizes, *strides, tiles_each, MIN_SCALE)
        launch(_scaled_sum_kernel, len(group.gs) * tiles_each, arguments, constants, specialised=True)


def _described(groups: list[_SumGroup], scale: Tensor) -> Launch:
    """Describe the traffic of one call's launches: the products that ordinary training makes for its weights."""
    added = [out for group in groups if group.add for out in group.outs]
    return Launch(
        name=_scaled_sum_kernel.__name__,
        family=GEMM,
        reads=[scale, *(tensor for group in groups for tensor in chain(group.gs, group.xs)), *added],
        writes=[out for group in groups for out in group.outs],
        flops=sum(2 * g.numel() * x.shape[2] for group in groups for g, x in zip(group.gs, group.xs, strict=True)),
    )


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(g: Tensor, x: Tensor, scale: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """Take a few samples at a time: scale the smaller operand, zero skipped samples, multiply."""
    if g.shape[:2].numel() == 0:
        return out if accumulate else out.zero_()
    if _rounds_products(g, out.dtype):
        return _sum_products(g, x, scale, out if accumulate else out.zero_())
    factors = scale.to(out.dtype)[:, None, None]
    skipped = ~(scale.abs() >= MIN_SCALE)[:, None, None]
    masks = g.device.type != "cpu" or bool(skipped.any())  # only the host is asked without waiting
    scales_g = g.shape[2] <= x.shape[2]
    for part in slices(g.shape[0], g.shape[1] * max(g.shape[2], x.shape[2]) * out.dtype.itemsize):
        scaled = (g if scales_g else x)[part] * factors[part]  # computed in the factors' dtype
        other = (x if scales_g else g)[part].to(out.dtype)
        if masks:
            scaled.masked_fill_(skipped[part], 0.0)
            other = other.masked_fill(skipped[part], 0.0)
        left, right = (scaled, other) if scales_g else (other, scaled)
        beta = 1 if part.start or accumulate else 0  # zero ignores what `out` holds
        out.addmm_(_positions_last(left), _positions_last(right).T, beta=beta)
    return out


def _positions_last(rows: Tensor) -> Tensor:
    """Return rows (b, T, n) as (n, b·T), read in memory order: positions of an image are side by side."""
    if rows.stride(2) != 1 and rows.stride(1) == 1:
        return rows.permute(2, 0, 1).reshape(rows.shape[2], -1)
    return rows.reshape(-1, rows.shape[2]).T


def _rounds_products(g: Tensor, dtype: torch.dtype) -> bool:
    """Return True if rounded operands could make a sample exceed its bound.

    With one position nothing cancels: the share is at most (1 + rounding)² of the exact one. For TF32 that is within
    the guaranteed 1e-3.
    """
    rounding = operand_rounding(g.device) if dtype == torch.float32 else 0.0
    return rounding > (TF32_ROUNDING if g.shape[1] == 1 else 0.0)


def _sum_products(g: Tensor, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Compute out += Σ_b c_b (G_bᵀX_b), each product rounded as torch rounds it."""
    scale = scale.where(scale.abs() >= MIN_SCALE, 0.0)
    for part in slices(g.shape[0], out.nbytes, scratch=True):
        products = torch.bmm(g[part].to(out.dtype).mT, x[part].to(out.dtype))
        kept_sums([products], scale[part], outs=[out])
    return out

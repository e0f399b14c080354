"""Squared norms of per-sample weight gradients by the triangular Gram path, batched over layers.

A weight W (p×d) that is applied to x_t (d) and receives g_t (p) at T positions has the per-sample gradient
Σ_t g_t x_tᵀ, and

    ‖Σ_t g_t x_tᵀ‖² = Σ_{t,s} (x_t·x_s)(g_t·g_s) = Σ_{t≥s} w_ts (x_t·x_s)(g_t·g_s),   w_ts = 2 for t > s, 1 for t = s.

Only tiles on and below the diagonal are visited. A program computes one tile of both Gram matrices in registers,
multiplies them elementwise and writes one float32: neither T×T matrix is ever in memory, and the d×p gradient is never
formed. Weights that share their input (q, k, v) are one unit: the g are put side by side, so x's tile is computed once.

All units of one length and dtype are served by one launch: the grid is units × samples × tiles, and a table holds
pointers, widths and strides. One layer of a transformer at T=256 has fewer tiles than a large GPU has multiprocessors;
all of its layers together fill it, and cost the host one launch.

Accumulation: bfloat16 and float16 by tensor cores into float32; float32 by three products of its halves in tf32, which
keeps 22 bits of each factor, is as near as a product in float32 and more than twice as fast as cuBLAS's; float64 in
float64. Each program owns its slots of the partial sums, so the result is deterministic.

Guarantee: a sample's result depends on that sample's rows alone, and no norm is too small by more than about 5e-4 of
itself. Rounding errs relative to S², S = Σ_t ‖g_t‖‖x_t‖, not to the norm: by about 1e-8·S² in float32 (measured on an
H200, 2026-11-15). Where a sample's positions cancel almost completely the computed square may be far too small, and a
large gradient would pass unclipped. So each unit's square is taken to be at least

    FLOOR · S²,     FLOOR = 2⁻¹⁴ (2⁻⁴⁰ in float64)

Above the floor the error is a small fraction of the square; below it the norm is over-estimated, which clips more,
never less. Incoherent positions give a square of S²/T or more, so up to T = 2¹⁴ ordinary data never meets the floor.

Every finite input has its norm. Squares of values below about 1e-19 or above 1e19 leave the range of float32, so each
position with ‖x_t‖² or ‖g_t‖² below SMALL is counted with the most that may have been lost of it,

    lost = Σ_t √(‖x_t‖² + d·2⁻¹²⁶) √(‖g_t‖² + p·2⁻¹²⁶)     over those t,

and a sample whose square is not finite, or not large beside lost², is computed once more in float64, which holds the
squares of all float32 squares. The kernel for that runs after every launch and ends at once where there is nothing to
do: nobody waits for the host to look.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.triton_runtime import (
    INTERPRETED,
    TRITON_DTYPES,
    Backend,
    constant,
    dot,
    is_hopper,
    jit,
    launch_on,
    provide_scratch,
    rows_are_aligned,
    table_on,
    tl,
    use_triton,
    with_aligned_rows,
)
from dpscope.vocabulary.families import CLIPPING
from dpscope.vocabulary.launches import Launch, announce

CHUNK_BYTES = 64 * 2**20
"""The fallback holds no temporary larger than this."""


FLOOR, FLOOR_FLOAT64 = 2.0**-14, 2.0**-40
"""The least share of S² a unit's squared norm is taken to be."""

SMALL = 2.0**-90
"""Squares below it may have lost more than rounding: products below UNDERFLOW count as zero."""

UNDERFLOW = 2.0**-126

NEGLIGIBLE = 2.0**-40
"""Of a square: what may be lost of it."""

_SMALL, _UNDERFLOW, _NEGLIGIBLE, _FLOOR, UNIT_COLUMNS = map(constant, (SMALL, UNDERFLOW, NEGLIGIBLE, FLOOR, 6))


class GramUnit(NamedTuple):
    """One weight's per-sample gradient Σ_t g_t x_tᵀ.

    gs: each (B, T, p_j), side by side along features. Either xs: each (B, T, d_i), side by side; or ids: (B, T)
    integers, for an embedding: then x_t·x_s is [ids_t = ids_s], and rows with ids = padding_idx count zero.

    Checked where it is used: a step makes hundreds of them.
    """

    gs: tuple[Tensor, ...]
    xs: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    padding_idx: int | None = None


@dataclass(frozen=True)
class GramTiles:
    """How a launch is cut. block_s is a multiple of block_t; `tma`: tiles come through tensor descriptors
    where rows are aligned."""

    block_t: int
    block_s: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool


def gram_norms_squared(
    units: Sequence[GramUnit],
    *,
    backend: Backend = "auto",
    tiles: GramTiles | None = None,
) -> Tensor:
    """Σ over units of ‖Σ_t g_t x_tᵀ‖², per sample: (B,) float64.

    Units share B; T, widths and dtypes may differ. `tiles` forces a configuration (for measurements).
    """
    if not units:
        raise ValueError("gram_norms_squared needs at least one unit")
    device = units[0].gs[0].device
    batch = units[0].gs[0].shape[0]
    groups: dict[_Kind, list[_Rows]] = {}
    for unit in units:
        kind, rows = _rows(unit, batch)
        if backend != "torch" and _worth_aligning(kind, device):
            gs, xs = (
                tuple([each if rows_are_aligned(each) else with_aligned_rows(each) for each in side])
                for side in (unit.gs, unit.xs)
            )
            kind, rows = _rows(unit._replace(gs=gs, xs=xs), batch)
        groups.setdefault(kind, []).append(rows)
    parts: list[Tensor] = []
    for kind, members in groups.items():
        served = batch > 0 and kind.length > 0 and kind.served
        why_not = f"dtypes {kind.x_dtype}, {kind.g_dtype}, B={batch}, T={kind.length}"
        by_kernel = use_triton(backend, device, served=served, why_not=why_not)
        if by_kernel:
            chosen = tiles or _choose_tiles(kind, device)
            parts.append(_launch(kind, members, batch, device, chosen))
        else:
            parts.append(_gram_norms_torch(kind, members, on_device=by_kernel))
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def _worth_aligning(kind: _Kind, device: torch.device) -> bool:
    """Every row is read T / block_t times: long samples pay for a copy that is read through the copy engine."""
    return kind.served and not kind.aligned and kind.g_dtype.itemsize == 2 and kind.length >= 128 and is_hopper(device)


class _Kind(NamedTuple):
    """What units of one launch have in common. x_dtype: None for ids."""

    length: int
    x_dtype: torch.dtype | None
    g_dtype: torch.dtype
    served: bool  # one dtype a side, which the kernel knows
    aligned: bool  # rows begin on 16-byte words: what tensor descriptors need
    whole: bool  # and end on them: what 16-byte copies need besides
    row_major: bool


class _Rows(NamedTuple):
    """A unit as the table's integers: pointer, width, stride over samples and over positions of each tensor."""

    width: int  # features of both sides together: what one tile costs, up to a factor
    segments: list[int]
    unit: GramUnit


def _rows(unit: GramUnit, batch: int) -> tuple[_Kind, _Rows]:
    """One pass over the unit's tensors, which also checks their shapes: this runs on the host in every step."""
    gs, xs, ids, _ = unit
    if not gs or bool(xs) == (ids is not None):
        raise ValueError("a GramUnit needs gs and either xs or ids")
    if gs[0].shape[0] != batch:
        raise ValueError(f"units must share the batch size, got {batch} and {gs[0].shape[0]}")
    length = gs[0].shape[1]
    if ids is not None and ids.shape != (batch, length):
        raise ValueError(f"expected ids of shape {(batch, length)}, got {tuple(ids.shape)}")
    g_dtype = gs[0].dtype
    x_dtype = xs[0].dtype if xs else None
    served = g_dtype in TRITON_DTYPES and (x_dtype is None or x_dtype in TRITON_DTYPES)
    row_major, apart, bits, ends, total = True, True, 0, 0, 0
    segments: list[int] = []
    for side, dtype in ((xs, x_dtype), (gs, g_dtype)):
        size = 0 if dtype is None else dtype.itemsize
        for tensor in side:
            shape = tensor.shape
            if len(shape) != 3 or shape[0] != batch or shape[1] != length:
                raise ValueError(f"expected (B, T, features) with B, T = {(batch, length)}, got {tuple(shape)}")
            if tensor.dtype != dtype:
                served = False
            stride_b, stride_t, stride_f = tensor.stride()
            width = shape[2]
            pointer = tensor.data_ptr()
            segments += (pointer, width, stride_b, stride_t)
            total += width
            bits |= pointer | (stride_b | stride_t) * size
            ends |= width * size
            if stride_f != 1:
                row_major = False
            if stride_t < width or stride_b == 0:
                apart = False
    aligned = row_major and apart and bits % 16 == 0
    whole = aligned and ends % 16 == 0
    return _Kind(length, x_dtype, g_dtype, served, aligned, whole, row_major), _Rows(total, segments, unit)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _gram_tile(
    segments,
    first,
    count,
    sample,
    row,
    col,
    length,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Rows [row, row+BLOCK_T) against rows [col, col+BLOCK_S) of one sample, summed over `count` segments, float32."""
    acc = tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32)
    for segment in range(first, first + count):
        entry = segments + segment * 4
        width = tl.load(entry + 1).to(tl.int32)
        stride_t = tl.load(entry + 3)
        base = tl.load(entry).to(tl.pointer_type(DTYPE)) + sample.to(tl.int64) * tl.load(entry + 2)
        if TMA:  # reads past T or past the width give zeros
            shape = [length, width]
            rows = tl.make_tensor_descriptor(base, shape, [stride_t, 1], [BLOCK_T, BLOCK_K])
            if BLOCK_T == BLOCK_S:
                cols = rows
            else:
                cols = tl.make_tensor_descriptor(base, shape, [stride_t, 1], [BLOCK_S, BLOCK_K])
            for k in range(0, width, BLOCK_K):
                acc = dot(rows.load([row, k]), cols.load([col, k]).T, acc, "tf32x3")
        else:
            if ALIGNED:  # 16-byte asynchronous copies need to know it
                VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
                base = tl.multiple_of(base, 16)
                stride_t = tl.multiple_of(stride_t, VECTOR)
                width = tl.multiple_of(width, VECTOR)
            t = row + tl.arange(0, BLOCK_T)
            s = col + tl.arange(0, BLOCK_S)
            f = tl.arange(0, BLOCK_K)
            row_pointers = base + t.to(tl.int64)[:, None] * stride_t + f[None, :]
            col_pointers = base + s.to(tl.int64)[None, :] * stride_t + f[:, None]
            for k in range(0, width, BLOCK_K):
                a = tl.load(row_pointers, mask=(t < length)[:, None] & (f[None, :] < width - k), other=0.0)
                b = tl.load(col_pointers, mask=(s < length)[None, :] & (f[:, None] < width - k), other=0.0)
                acc = dot(a, b, acc, "tf32x3")
                row_pointers += BLOCK_K
                col_pointers += BLOCK_K
    return acc


@jit
def _store_sums(
    partials, x_gram, g_gram, row, col, length, x_width, g_width, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Σ w_ts x_gram g_gram over the tile, w = 2 below the diagonal, 1 on it, 0 above; Σ_t ‖x_t‖‖g_t‖, and `lost`."""
    program = tl.program_id(0)
    t = row + tl.arange(0, BLOCK_T)[:, None]
    s = col + tl.arange(0, BLOCK_S)[None, :]
    products = x_gram * g_gram
    weight = tl.where(t > s, 2.0, tl.where(t == s, 1.0, 0.0))
    tl.store(partials + program, tl.sum(products * weight))
    lengths = 0.0
    lost = 0.0
    if row < col + BLOCK_S:  # no tile lies above the diagonal: this one meets it
        lengths = tl.sum(tl.sqrt(tl.where(t == s, products, 0.0)))
        at_risk = (t == s) & (t < length) & ((x_gram < _SMALL) | (g_gram < _SMALL))
        most = tl.sqrt(x_gram + x_width * _UNDERFLOW) * tl.sqrt(g_gram + g_width * _UNDERFLOW)
        lost = tl.sum(tl.where(at_risk, most, 0.0))
    tl.store(partials + tl.num_programs(0) + program, lengths)
    tl.store(partials + 2 * tl.num_programs(0) + program, lost)


@jit
def _gram_kernel(
    tile_table,
    unit_table,
    segments,
    partials,
    batch,
    n_tiles,
    length,
    X_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile of one sample of one unit. partials: (3, units, B, tiles), see _store_sums."""
    program = tl.program_id(0)
    tile = tile_table + (program % n_tiles) * 2
    sample = (program // n_tiles) % batch
    unit = unit_table + (program // n_tiles // batch) * UNIT_COLUMNS
    row = tl.load(tile).to(tl.int32) * BLOCK_T
    col = tl.load(tile + 1).to(tl.int32) * BLOCK_S
    x_first = tl.load(unit).to(tl.int32)
    x_count = tl.load(unit + 1).to(tl.int32)
    g_first = tl.load(unit + 2).to(tl.int32)
    g_count = tl.load(unit + 3).to(tl.int32)
    # fmt: off
    x_gram = _gram_tile(segments, x_first, x_count, sample, row, col, length,
                        X_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED)
    g_gram = _gram_tile(segments, g_first, g_count, sample, row, col, length,
                        G_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED)
    # fmt: on
    _store_sums(partials, x_gram, g_gram, row, col, length, tl.load(unit + 4), tl.load(unit + 5), BLOCK_T, BLOCK_S)


@jit
def _gram_ids_kernel(
    tile_table,
    unit_table,
    segments,
    partials,
    batch,
    n_tiles,
    length,
    G_DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """As above with x_t·x_s = [ids_t = ids_s ≠ padding]; g is not read for tiles in which no ids match."""
    program = tl.program_id(0)
    tile = tile_table + (program % n_tiles) * 2
    sample = (program // n_tiles) % batch
    unit = unit_table + (program // n_tiles // batch) * UNIT_COLUMNS
    row = tl.load(tile).to(tl.int32) * BLOCK_T
    col = tl.load(tile + 1).to(tl.int32) * BLOCK_S
    ids = tl.load(unit).to(tl.pointer_type(tl.int64)) + sample.to(tl.int64) * length
    padding = tl.load(unit + 1)
    g_first = tl.load(unit + 2).to(tl.int32)
    g_count = tl.load(unit + 3).to(tl.int32)
    t = row + tl.arange(0, BLOCK_T)
    s = col + tl.arange(0, BLOCK_S)
    row_ids = tl.load(ids + t, mask=t < length, other=-1)
    col_ids = tl.load(ids + s, mask=s < length, other=-2)
    match = (row_ids[:, None] == col_ids[None, :]) & (row_ids != padding)[:, None]
    if tl.max(match.to(tl.int32)) > 0:
        # fmt: off
        g_gram = _gram_tile(segments, g_first, g_count, sample, row, col, length,
                            G_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED)
        # fmt: on
        x_gram = match.to(tl.float32)
        _store_sums(partials, x_gram, g_gram, row, col, length, 0, tl.load(unit + 5), BLOCK_T, BLOCK_S)
    else:
        for sum_of in range(3):
            tl.store(partials + sum_of * tl.num_programs(0) + program, 0.0)


@jit
def _wide_rows(segments, segment, sample, start, k, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """Features [k, k+K) of rows [start, start+BLOCK) of one segment, float64."""
    entry = segments + segment * 4
    base = tl.load(entry).to(tl.pointer_type(DTYPE)) + sample.to(tl.int64) * tl.load(entry + 2)
    t = start + tl.arange(0, BLOCK)
    f = k + tl.arange(0, K)
    inside = (t < length)[:, None] & (f < tl.load(entry + 1))[None, :]
    values = tl.load(base + t.to(tl.int64)[:, None] * tl.load(entry + 3) + f[None, :], mask=inside, other=0.0)
    return values.to(tl.float32).to(tl.float64)


@jit
def _wide_gram(
    segments, first, count, sample, row, col, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """A tile of the Gram matrix in float64."""
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float64)
    for segment in range(first, first + count):
        width = tl.load(segments + segment * 4 + 1).to(tl.int32)
        for k in range(0, width, K):
            rows = _wide_rows(segments, segment, sample, row, k, length, DTYPE, BLOCK, K)
            cols = _wide_rows(segments, segment, sample, col, k, length, DTYPE, BLOCK, K)
            acc += tl.sum(rows[:, None, :] * cols[None, :, :], axis=2)
    return acc


@jit
def _largest(segments, first, count, sample, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """The largest |value| of a sample; NaN or inf where there is one."""
    peaks = tl.zeros((BLOCK, K), dtype=tl.float64)
    for segment in range(first, first + count):
        width = tl.load(segments + segment * 4 + 1).to(tl.int32)
        for row in range(0, length, BLOCK):
            for k in range(0, width, K):
                values = tl.abs(_wide_rows(segments, segment, sample, row, k, length, DTYPE, BLOCK, K))
                peaks = tl.where(values <= peaks, peaks, values + peaks * 0.0)  # NaN stays, once it is in
    return tl.sum(peaks)


@jit
def _gram_finish_kernel(
    unit_table,
    segments,
    sums,
    squares,
    batch,
    length,
    X_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
):
    """One program: one sample of one unit. sums: (3, units, B) of _store_sums; squares: (units, B), float64.

    X_DTYPE None: ids. What float32 has held is floored and stored. What it has not is computed anew.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    square = tl.load(sums + program).to(tl.float64)
    lengths = tl.load(sums + programs + program).to(tl.float64)
    lost = tl.load(sums + 2 * programs + program).to(tl.float64)
    good = (tl.abs(square) < float("inf")) & (lengths < float("inf")) & (lost * lost <= square * _NEGLIGIBLE)
    if not good:
        sample = program % batch
        unit = unit_table + (program // batch) * UNIT_COLUMNS
        g_first = tl.load(unit + 2).to(tl.int32)
        g_count = tl.load(unit + 3).to(tl.int32)
        largest = _largest(segments, g_first, g_count, sample, length, G_DTYPE, BLOCK, K)
        if X_DTYPE is not None:
            x_first = tl.load(unit).to(tl.int32)
            x_count = tl.load(unit + 1).to(tl.int32)
            largest *= _largest(segments, x_first, x_count, sample, length, X_DTYPE, BLOCK, K)
        square = largest * 0.0  # NaN where a value is not finite
        lengths = square
        if largest > 0.0 and largest < float("inf"):
            for row in range(0, length, BLOCK):
                t = row + tl.arange(0, BLOCK)
                for col in range(0, row + BLOCK, BLOCK):
                    s = col + tl.arange(0, BLOCK)
                    products = _wide_gram(segments, g_first, g_count, sample, row, col, length, G_DTYPE, BLOCK, K)
                    if X_DTYPE is not None:
                        products *= _wide_gram(segments, x_first, x_count, sample, row, col, length, X_DTYPE, BLOCK, K)
                    else:
                        ids = tl.load(unit).to(tl.pointer_type(tl.int64)) + sample.to(tl.int64) * length
                        row_ids = tl.load(ids + t, mask=t < length, other=-1)
                        col_ids = tl.load(ids + s, mask=s < length, other=-2)
                        match = (row_ids[:, None] == col_ids[None, :]) & (row_ids != tl.load(unit + 1))[:, None]
                        products = tl.where(match, products, 0.0)
                    diagonal = t[:, None] == s[None, :]
                    square += tl.sum(
                        tl.where(t[:, None] > s[None, :], 2.0 * products, tl.where(diagonal, products, 0.0))
                    )
                    lengths += tl.sum(tl.sqrt(tl.where(diagonal, products, 0.0)))
    floor = lengths * lengths * _FLOOR
    tl.store(squares + program, tl.where(square < floor, floor, square))


def _choose_tiles(kind: _Kind, device: torch.device) -> GramTiles:
    """Half precision on Hopper: measured on an H200 (bench_gram_norms.py, 2026-11-15), all Linear layers of preset 1b.

    128×128×64 with 8 warps and 4 stages through descriptors takes 2.04 ms at B=16, T=256 (64×128×128: 2.9 ms) and
    22.7 ms at B=16, T=1024. float32, one unit of 2048 and 2048 features at B=8, T=1024: 64×64×32 with 4 warps and 3
    stages takes 0.53 ms, 128×64 0.60, 128×128 0.68, cuBLAS without tf32 1.23 (2026-11-15). The other choices are not
    measured: shorter samples take smaller tiles, and what has no descriptors or no tensor cores takes what fits.
    """
    hopper = is_hopper(device)
    tma = hopper and kind.aligned
    if torch.float32 in (kind.x_dtype, kind.g_dtype):
        return GramTiles(64, 64, 32, 4, 3, tma)
    if kind.length <= 64:
        return GramTiles(64, 64, 64, 4, 3, tma)
    if not hopper:
        return GramTiles(128, 128, 32, 8, 3, tma=False)
    return GramTiles(128, 128, 64, 8, 4, tma)


@functools.lru_cache(maxsize=64)
def _tile_table(length: int, block_t: int, block_s: int, device: torch.device) -> tuple[Tensor, int]:
    """(i, j) of every tile that holds some t >= s, flat: i0, j0, i1, j1, …; and their number."""
    n_rows, n_cols = -(-length // block_t), -(-length // block_s)
    tiles = [(i, j) for i in range(n_rows) for j in range(n_cols) if (i + 1) * block_t > j * block_s]
    (table,) = table_on(device, [value for tile in tiles for value in tile], wait=True)
    return table, len(tiles)


def _row_major(rows: _Rows, kept: list[Tensor]) -> _Rows:
    """The unit with copies of the tensors whose features do not lie side by side."""
    unit = rows.unit
    xs, gs = (tuple(x if x.stride(2) == 1 else x.contiguous() for x in side) for side in (unit.xs, unit.gs))
    kept += (*xs, *gs)
    return _rows(GramUnit(gs, xs, unit.ids, unit.padding_idx), gs[0].shape[0])[1]


class _Tables(NamedTuple):
    """Units of one kind on the device: see the kernels. `kept`: copies that must outlive the launches' enqueueing."""

    units: Tensor
    segments: Tensor
    kept: list[Tensor]


def _tables(kind: _Kind, members: list[_Rows], device: torch.device) -> _Tables:
    kept: list[Tensor] = []
    if not kind.row_major:
        members = [_row_major(rows, kept) for rows in members]
    unit_rows: list[int] = []
    segments: list[int] = []
    for _, own, (gs, xs, ids, padding_idx) in members:
        first = len(segments) // 4
        segments += own
        g_width = sum(g.shape[2] for g in gs)
        if ids is not None:
            kept.append(ids.to(torch.int64).contiguous())
            padding = -1 if padding_idx is None else padding_idx
            unit_rows += (kept[-1].data_ptr(), padding, first, len(gs), 0, g_width)
        else:
            x_width = sum(x.shape[2] for x in xs)
            unit_rows += (first, len(xs), first + len(xs), len(gs), x_width, g_width)
    unit_table, segment_table = table_on(device, unit_rows, segments)
    return _Tables(unit_table, segment_table, kept)


def _dtypes(kind: _Kind) -> dict[str, Any]:
    return {
        "X_DTYPE": None if kind.x_dtype is None else TRITON_DTYPES[kind.x_dtype],
        "G_DTYPE": TRITON_DTYPES[kind.g_dtype],
    }


def _launch(kind: _Kind, members: list[_Rows], batch: int, device: torch.device, tiles: GramTiles) -> Tensor:
    """One launch for units of one kind: (B,) float64."""
    members.sort(key=lambda rows: -rows.width)  # heavy first: the tail of the grid is short
    tables = _tables(kind, members, device)
    tile_table, n_tiles = _tile_table(kind.length, tiles.block_t, tiles.block_s, device)
    partials = torch.empty((3, len(members), batch, n_tiles), dtype=torch.float32, device=device)
    dtypes = _dtypes(kind)
    kernel = _gram_kernel
    if kind.x_dtype is None:
        kernel = _gram_ids_kernel
        del dtypes["X_DTYPE"]
    tma = tiles.tma and kind.aligned
    if tma:
        provide_scratch(device)
    with launch_on(device):
        kernel[(len(members) * batch * n_tiles,)](
            tile_table,
            tables.units,
            tables.segments,
            partials,
            batch,
            n_tiles,
            kind.length,
            **dtypes,
            BLOCK_T=tiles.block_t,
            BLOCK_S=tiles.block_s,
            BLOCK_K=tiles.block_k,
            TMA=tma,
            ALIGNED=kind.whole and not INTERPRETED,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    announce(
        lambda: Launch(
            name=kernel.__name__,
            family=CLIPPING,
            reads=[t for _, _, (gs, xs, ids, _) in members for t in (*gs, *xs, *([] if ids is None else [ids]))],
            writes=[partials],
            flops=batch * kind.length * (kind.length + 1) * sum(rows.width for rows in members),
        )
    )
    return _finish_on_device(kind, tables, partials.sum(3))


def _finish_on_device(kind: _Kind, tables: _Tables, sums: Tensor) -> Tensor:
    """(3, units, B) float32 -> (B,) float64, without waiting for the device."""
    _, units, batch = sums.shape
    sums = sums.contiguous()
    squares = torch.empty((units, batch), dtype=torch.float64, device=sums.device)
    with launch_on(sums.device):
        _gram_finish_kernel[(units * batch,)](
            tables.units,
            tables.segments,
            sums,
            squares,
            batch,
            kind.length,
            **_dtypes(kind),
            BLOCK=16,
            K=16,
            num_warps=4,
        )
    announce(lambda: Launch(name=_gram_finish_kernel.__name__, family=CLIPPING, reads=[sums], writes=[squares]))
    return squares.sum(0)


# -- torch -------------------------------------------------------------------------------------------------------------


def _sums_by_torch(unit: GramUnit, dtype: torch.dtype) -> Tensor:
    """(3, B): Σ w_ts (x_t·x_s)(g_t·g_s), S and `lost`, by strips of rows."""
    batch, length, g_width = unit.gs[0].shape[0], unit.gs[0].shape[1], sum(g.shape[2] for g in unit.gs)
    x_width = sum(x.shape[2] for x in unit.xs)
    sums = torch.zeros(3, batch, dtype=dtype, device=unit.gs[0].device)
    squares, lengths, lost = sums.unbind(0)
    rows = max(1, min(length, 512, CHUNK_BYTES // max(1, length * dtype.itemsize)))
    samples = max(1, CHUNK_BYTES // max(1, rows * length * dtype.itemsize))
    for first in range(0, batch, samples):
        chosen = slice(first, first + samples)
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            if unit.ids is None:
                x_gram = _gram_strip(unit.xs, chosen, start, stop, dtype)
            else:
                ids = unit.ids[chosen]
                match = ids[:, start:stop, None] == ids[:, None, :stop]
                if unit.padding_idx is not None:
                    match &= (ids[:, start:stop] != unit.padding_idx)[:, :, None]
                x_gram = match.to(dtype)
            g_gram = _gram_strip(unit.gs, chosen, start, stop, dtype)
            if dtype == torch.float32:
                x_own, g_own = (gram[:, :, start:].diagonal(dim1=1, dim2=2) for gram in (x_gram, g_gram))
                most = (x_own + x_width * UNDERFLOW).sqrt() * (g_own + g_width * UNDERFLOW).sqrt()
                lost[chosen] += most.where((x_own < SMALL) | (g_own < SMALL), 0.0).sum(1)
            products = x_gram.mul_(g_gram)
            # Columns before the strip are below the diagonal and count twice; the strip's own square holds both halves.
            own = products[:, :, start:]
            squares[chosen] += 2 * products[:, :, :start].sum(dim=(1, 2)) + own.sum(dim=(1, 2))
            lengths[chosen] += own.diagonal(dim1=1, dim2=2).sqrt().sum(1)
    return sums


def _gram_norms_torch(kind: _Kind, members: list[_Rows], *, on_device: bool) -> Tensor:
    """The same by torch: (B,) float64. `on_device`: what float32 does not hold is left to the kernel."""
    units = [member.unit for member in members]
    rounded = operand_rounding(units[0].gs[0].device) > 0.0  # float32 operands would be: the norms are of exact ones
    if rounded or any(tensor.dtype == torch.float64 for unit in units for tensor in (*unit.gs, *unit.xs)):
        wide = [_floored(_sums_by_torch(unit, torch.float64), FLOOR_FLOAT64) for unit in units]
        return torch.stack(wide).sum(0)
    sums = torch.stack([_sums_by_torch(unit, torch.float32) for unit in units], 1)
    if on_device:
        return _finish_on_device(kind, _tables(kind, members, sums.device), sums)
    squares = torch.stack([_floored(each.double(), FLOOR) for each in sums.unbind(1)])
    again = ~(sums.isfinite().all(0) & (sums[2].double().square() <= NEGLIGIBLE * sums[0]))
    for index in again.any(1).nonzero().flatten().tolist():
        chosen = again[index].nonzero().flatten()
        unit = units[index]
        gs, xs = (tuple(tensor[chosen].double() for tensor in side) for side in (unit.gs, unit.xs))
        ids = None if unit.ids is None else unit.ids[chosen]
        squares[index, chosen] = _floored(_sums_by_torch(GramUnit(gs, xs, ids, unit.padding_idx), torch.float64), FLOOR)
    return squares.sum(0)


def _floored(sums: Tensor, floor: float) -> Tensor:
    """max(square, floor·S²), NaN where either is: see the guarantee above. sums: (3, B)."""
    return torch.maximum(sums[0], sums[1].square() * floor)


def _gram_strip(tensors: Sequence[Tensor], chosen: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows [start, stop) against rows [0, stop) of the chosen samples: (b, stop-start, stop)."""
    strip: Tensor | None = None
    for tensor in tensors:
        for part in _feature_chunks(tensor[chosen, :stop], dtype):
            converted = part.to(dtype)
            product = torch.bmm(converted[:, start:], converted.mT)
            strip = product if strip is None else strip.add_(product)
    assert strip is not None
    return strip


def _feature_chunks(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tensor itself, or slices along features small enough to be converted."""
    if tensor.dtype == dtype:
        yield tensor
        return
    wide = max(1, CHUNK_BYTES // max(1, tensor.shape[0] * tensor.shape[1] * dtype.itemsize))
    yield from tensor.split(wide, dim=2)

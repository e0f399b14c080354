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

Accumulation: bfloat16 and float16 by tensor cores into float32; float32 in float32 (tf32 only if `allow_tf32`); float64
in float64. Each program owns one slot of the partial sums, so the result is deterministic.

Guarantee: a sample's result depends on that sample's rows alone. Rounding errs by about the float32 epsilon relative to
(Σ_t ‖g_t‖‖x_t‖)², not to the norm itself: where a sample's positions cancel almost completely, the relative error of
the norm grows in proportion.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import (
    INTERPRETED,
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

CHUNK_BYTES = 64 * 2**20
"""The fallback holds no temporary larger than this."""


@dataclass(frozen=True, eq=False)
class GramUnit:
    """One weight's per-sample gradient Σ_t g_t x_tᵀ.

    gs: each (B, T, p_j), side by side along features. Either xs: each (B, T, d_i), side by side; or ids: (B, T)
    integers, for an embedding: then x_t·x_s is [ids_t = ids_s], and rows with ids = padding_idx count zero.
    """

    gs: tuple[Tensor, ...]
    xs: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        if not self.gs or bool(self.xs) == (self.ids is not None):
            raise ValueError("a GramUnit needs gs and either xs or ids")
        lead = self.gs[0].shape[:2]
        for tensor in (*self.gs, *self.xs):
            if tensor.dim() != 3 or tensor.shape[:2] != lead:
                raise ValueError(f"expected (B, T, features) with B, T = {tuple(lead)}, got {tuple(tensor.shape)}")
        if self.ids is not None and self.ids.shape != lead:
            raise ValueError(f"expected ids of shape {tuple(lead)}, got {tuple(self.ids.shape)}")

    @property
    def batch(self) -> int:
        return self.gs[0].shape[0]

    @property
    def length(self) -> int:
        return self.gs[0].shape[1]

    @property
    def width(self) -> int:
        """Features of both sides together: what one tile costs, up to a factor."""
        return sum(tensor.shape[2] for tensor in (*self.gs, *self.xs))

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in (*self.gs, *self.xs)}


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
    allow_tf32: bool = False,
    backend: Backend = "auto",
    tiles: GramTiles | None = None,
) -> Tensor:
    """Σ over units of ‖Σ_t g_t x_tᵀ‖², per sample: (B,) float32, or float64 if any input is float64.

    Units share B; T, widths and dtypes may differ. `tiles` forces a configuration (for measurements).
    """
    if not units:
        raise ValueError("gram_norms_squared needs at least one unit")
    batch, device = units[0].batch, units[0].gs[0].device
    if any(unit.batch != batch for unit in units):
        raise ValueError(f"units must share the batch size, got {sorted({unit.batch for unit in units})}")
    kernel_units: dict[tuple[Any, ...], list[GramUnit]] = {}
    total: Tensor | None = None
    for unit in units:
        served = batch > 0 and unit.length > 0 and _served_dtypes(unit)
        why_not = f"dtypes {unit.dtypes}, B={batch}, T={unit.length}"
        preferred = backend == "triton" or _kernel_is_better(unit, allow_tf32)
        if use_triton(backend, device, served=served, why_not=why_not) and preferred:
            kernel_units.setdefault(_launch_key(unit), []).append(unit)
            continue
        part = _gram_norm_torch(unit)
        total = part if total is None else total + part
    for group in kernel_units.values():
        part = _launch(group, tiles or _choose_tiles(group[0], allow_tf32), allow_tf32)
        total = part if total is None else total + part
    assert total is not None
    return total.clamp_min(0.0)  # rounding can leave a vanishing norm just below zero; NaN stays NaN


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
    PRECISION: tl.constexpr,
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
                acc = dot(rows.load([row, k]), cols.load([col, k]).T, acc, PRECISION)
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
                acc = dot(a, b, acc, PRECISION)
                row_pointers += BLOCK_K
                col_pointers += BLOCK_K
    return acc


@jit
def _weighted_sum(x_gram, g_gram, row, col, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Σ w_ts x_gram g_gram over the tile: 2 below the diagonal, 1 on it, 0 above."""
    t = row + tl.arange(0, BLOCK_T)[:, None]
    s = col + tl.arange(0, BLOCK_S)[None, :]
    weight = tl.where(t > s, 2.0, tl.where(t == s, 1.0, 0.0))
    return tl.sum(x_gram * g_gram * weight)


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
    PRECISION: tl.constexpr,
):
    """One program: one tile of one sample of one unit. partials: (units, B, tiles)."""
    program = tl.program_id(0)
    tile = tile_table + (program % n_tiles) * 2
    sample = (program // n_tiles) % batch
    unit = unit_table + (program // n_tiles // batch) * 4
    row = tl.load(tile).to(tl.int32) * BLOCK_T
    col = tl.load(tile + 1).to(tl.int32) * BLOCK_S
    x_first = tl.load(unit).to(tl.int32)
    x_count = tl.load(unit + 1).to(tl.int32)
    g_first = tl.load(unit + 2).to(tl.int32)
    g_count = tl.load(unit + 3).to(tl.int32)
    # fmt: off
    x_gram = _gram_tile(segments, x_first, x_count, sample, row, col, length,
                        X_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED, PRECISION)
    g_gram = _gram_tile(segments, g_first, g_count, sample, row, col, length,
                        G_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED, PRECISION)
    # fmt: on
    tl.store(partials + program, _weighted_sum(x_gram, g_gram, row, col, BLOCK_T, BLOCK_S))


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
    PRECISION: tl.constexpr,
):
    """As above with x_t·x_s = [ids_t = ids_s ≠ padding]; g is not read for tiles in which no ids match."""
    program = tl.program_id(0)
    tile = tile_table + (program % n_tiles) * 2
    sample = (program // n_tiles) % batch
    unit = unit_table + (program // n_tiles // batch) * 4
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
    total = 0.0
    if tl.max(match.to(tl.int32)) > 0:
        # fmt: off
        g_gram = _gram_tile(segments, g_first, g_count, sample, row, col, length,
                            G_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED, PRECISION)
        # fmt: on
        total = _weighted_sum(match.to(tl.float32), g_gram, row, col, BLOCK_T, BLOCK_S)
    tl.store(partials + program, total)


def _served_dtypes(unit: GramUnit) -> bool:
    """The kernel takes one dtype for all of xs and one for all of gs."""
    one_a_side = len({x.dtype for x in unit.xs}) <= 1 and len({g.dtype for g in unit.gs}) == 1
    return one_a_side and unit.dtypes <= set(TRITON_DTYPES)


def _kernel_is_better(unit: GramUnit, allow_tf32: bool) -> bool:
    """Tensor cores for half types and tf32. Plain float32: cuBLAS is faster, but only if it may not round to tf32."""
    if torch.float32 not in unit.dtypes:
        return True
    return allow_tf32 or torch.get_float32_matmul_precision() != "highest"


def _launch_key(unit: GramUnit) -> tuple[Any, ...]:
    """Units with equal keys go into one launch."""
    aligned = rows_are_aligned(*unit.gs, *unit.xs)
    return unit.length, unit.xs[0].dtype if unit.xs else None, unit.gs[0].dtype, aligned


def _choose_tiles(unit: GramUnit, allow_tf32: bool) -> GramTiles:
    """Constants measured on an H200 (benchmarks/kernels/bench_gram_norms.py), by length."""
    tma = is_hopper(unit.gs[0].device) and rows_are_aligned(*unit.gs, *unit.xs)
    if torch.float32 in unit.dtypes:
        return GramTiles(64, 64, 32, 4, 3, tma and allow_tf32)
    if unit.length <= 64:
        return GramTiles(64, 64, 64, 4, 3, tma)
    if not is_hopper(unit.gs[0].device):
        return GramTiles(128, 128, 32, 8, 3, tma=False)
    if unit.length <= 256:
        return GramTiles(64, 128, 128, 4, 3, tma)
    return GramTiles(128, 128, 64, 8, 4, tma)


@functools.lru_cache(maxsize=64)
def _tile_coordinates(length: int, block_t: int, block_s: int) -> tuple[int, ...]:
    """(i, j) of every tile that holds some t >= s, flat: i0, j0, i1, j1, …"""
    n_rows, n_cols = -(-length // block_t), -(-length // block_s)
    return tuple(
        value for i in range(n_rows) for j in range(n_cols) if (i + 1) * block_t > j * block_s for value in (i, j)
    )


def _segment(tensor: Tensor) -> tuple[int, int, int, int]:
    return tensor.data_ptr(), tensor.shape[2], tensor.stride(0), tensor.stride(1)


def _launch(units: list[GramUnit], tiles: GramTiles, allow_tf32: bool) -> Tensor:
    """One launch for units of one key: (B,) float32."""
    batch, length, device = units[0].batch, units[0].length, units[0].gs[0].device
    by_ids = units[0].ids is not None
    units = sorted(units, key=lambda unit: -unit.width)  # heavy first: the tail of the grid is short
    aligned = all(rows_are_aligned(*unit.gs, *unit.xs) for unit in units)
    tma = tiles.tma and aligned
    kept: list[Tensor] = []  # copies made here must outlive the launch's enqueueing

    def row_major(tensor: Tensor) -> Tensor:
        if tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
            kept.append(tensor)
        return tensor

    unit_rows: list[int] = []
    segment_rows: list[int] = []
    for unit in units:
        if unit.ids is not None:
            ids = unit.ids.to(torch.int64).contiguous()
            kept.append(ids)
            unit_rows += (ids.data_ptr(), -1 if unit.padding_idx is None else unit.padding_idx)
        else:
            unit_rows += (len(segment_rows) // 4, len(unit.xs))
        for x in unit.xs:
            segment_rows += _segment(row_major(x))
        unit_rows += (len(segment_rows) // 4, len(unit.gs))
        for g in unit.gs:
            segment_rows += _segment(row_major(g))
    coordinates = _tile_coordinates(length, tiles.block_t, tiles.block_s)
    n_tiles = len(coordinates) // 2
    tables = table_on(device, coordinates, unit_rows, segment_rows)
    partials = torch.empty(len(units), batch, n_tiles, dtype=torch.float32, device=device)
    dtypes = {"G_DTYPE": TRITON_DTYPES[units[0].gs[0].dtype]}
    if not by_ids:
        dtypes["X_DTYPE"] = TRITON_DTYPES[units[0].xs[0].dtype]
    kernel = _gram_ids_kernel if by_ids else _gram_kernel
    with launch_on(device):
        if tma:
            provide_scratch(device)
        kernel[(partials.numel(),)](
            *tables,
            partials,
            batch,
            n_tiles,
            length,
            **dtypes,
            BLOCK_T=tiles.block_t,
            BLOCK_S=tiles.block_s,
            BLOCK_K=tiles.block_k,
            TMA=tma,
            ALIGNED=aligned and not INTERPRETED,
            PRECISION="tf32" if allow_tf32 else "ieee",
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return partials.sum(dim=(0, 2))


# -- torch -------------------------------------------------------------------------------------------------------------


def _gram_norm_torch(unit: GramUnit) -> Tensor:
    """The same sum by strips of rows: (B,) in float32, or float64 where an input is."""
    dtype = torch.float64 if torch.float64 in unit.dtypes else torch.float32
    batch, length, device = unit.batch, unit.length, unit.gs[0].device
    result = torch.zeros(batch, dtype=dtype, device=device)
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
            products = x_gram.mul_(_gram_strip(unit.gs, chosen, start, stop, dtype))
            # Columns before the strip are below the diagonal and count twice; the strip's own square holds both halves.
            result[chosen] += 2 * products[:, :, :start].sum(dim=(1, 2)) + products[:, :, start:].sum(dim=(1, 2))
    return result


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

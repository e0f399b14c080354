"""Units of Gram norms: weights with what their per-sample gradients are made of, and the launches of their kernels.

A plan is a pure function of what the host sees of the units' tensors: shapes, strides, dtypes, and the last bits of
their pointers. Steps of equal units share it; a step fills in its pointers. Units of one kind share a launch.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpscope.flash.kernels.gram_kernels import _gram_finish_kernel, _gram_ids_kernel, _gram_kernel
from dpscope.flash.kernels.triton_runtime import (
    INTERPRETED,
    TRITON_DTYPES,
    is_hopper,
    launch,
    provide_scratch,
    table_on,
)
from dpscope.flash.torch_side.captures import device_cache
from dpscope.vocabulary.phases import CLIPPING, Launch, announce


class GramUnit(NamedTuple):
    """One weight's per-sample gradient Σ_t g_t x_tᵀ.

    gs: each (B, T, p_j), side by side along features. Either xs: each (B, T, d_i), side by side; or ids: (B, T)
    integers, for an embedding: then x_t·x_s is [ids_t = ids_s], and rows with ids = padding_idx count zero.
    `in_tf32`: TF32 holds every value of xs and gs, which are float32.

    Checked where it is used: a step makes hundreds of them.
    """

    gs: tuple[Tensor, ...]
    xs: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    padding_idx: int | None = None
    in_tf32: bool = False


class UnitKind(NamedTuple):
    """Properties that the units of one launch share. x_dtype: None for ids."""

    length: int
    x_dtype: torch.dtype | None
    g_dtype: torch.dtype
    served: bool  # one dtype a side, which the kernel knows
    aligned: bool  # rows begin on 16-byte words: what tensor descriptors need
    whole: bool  # and end on them: what 16-byte copies need besides
    row_major: bool
    in_tf32: bool


# How many xs and gs a unit has, which come one after the other; the shape of its ids, padding_idx, in_tf32.
UnitForm = tuple[int, int, torch.Size | None, int | None, bool]
Integers = npt.NDArray[np.int64]


class KindPlan(NamedTuple):
    """A launch: the tables of units of one kind, without pointers. See the kernels."""

    kind: UnitKind
    members: list[int]  # units, heavy ones first: the tail of the grid is short
    width: int  # features of all sides of all units
    tensors: list[int]  # of which each segment's pointer is
    segments: Integers  # (segments, 4): pointer, width, stride over samples and over positions
    units: Integers  # (units, 6)


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def plan_units(units: Sequence[GramUnit], batch: int) -> tuple[tuple[KindPlan, ...], Integers]:
    """Plan the launches for these units. Return them with the pointers of all tensors."""
    tensors = [tensor for unit in units for side in (unit.xs, unit.gs) for tensor in side]
    pointers = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
    forms = tuple([(len(xs), len(gs), None if ids is None else ids.shape, *others) for gs, xs, ids, *others in units])
    seen = tuple(map(_SHAPE, tensors)), tuple(map(Tensor.stride, tensors)), tuple(map(_DTYPE, tensors))
    return _plan(forms, *seen, (pointers & 15).tobytes(), batch), pointers


@lru_cache(maxsize=256)  # under Poisson sampling steps differ in the number of samples
def _plan(
    forms: tuple[UnitForm, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    low_bits: bytes,
    batch: int,
) -> tuple[KindPlan, ...]:
    bits = np.frombuffer(low_bits, dtype=np.int64).tolist()
    seen = list(zip(shapes, strides, dtypes, bits, strict=True))
    found: dict[UnitKind, list[tuple[int, int, list[list[int]]]]] = {}
    first = 0
    for number, form in enumerate(forms):
        after = first + form[0] + form[1]
        kind, segments = _rows_of_unit(form, seen[first:after], batch)
        found.setdefault(kind, []).append((number, first, segments))
        first = after
    return tuple(_plan_kind(kind, members, forms) for kind, members in found.items())


def _plan_kind(
    kind: UnitKind, members: list[tuple[int, int, list[list[int]]]], forms: tuple[UnitForm, ...]
) -> KindPlan:
    members = sorted(members, key=lambda member: -sum(row[1] for row in member[2]))
    rows: list[list[int]] = []
    segments: list[list[int]] = []
    tensors: list[int] = []
    for number, first_tensor, own in members:
        xs, gs, ids, padding_idx, _ = forms[number]
        first = len(segments)
        x_width, g_width = sum(row[1] for row in own[:xs]), sum(row[1] for row in own[xs:])
        if ids is not None:
            rows.append([0, -1 if padding_idx is None else padding_idx, first, gs, 0, g_width])
        else:
            rows.append([first, xs, first + xs, gs, x_width, g_width])
        segments += own
        tensors += range(first_tensor, first_tensor + xs + gs)
    table = np.array(segments, dtype=np.int64)
    chosen = [number for number, *_ in members]
    return KindPlan(kind, chosen, int(table[:, 1].sum()), tensors, table, np.array(rows, dtype=np.int64))


def _rows_of_unit(
    form: UnitForm, seen: list[tuple[torch.Size, tuple[int, ...], torch.dtype, int]], batch: int
) -> tuple[UnitKind, list[list[int]]]:
    """Check the unit's shapes and return its kind and segments."""
    n_xs, n_gs, ids, _, in_tf32 = form
    if not n_gs or bool(n_xs) == (ids is not None):
        raise ValueError("a GramUnit needs gs and either xs or ids")
    (g_batch, length, *_), _, g_dtype, _ = seen[n_xs]
    if g_batch != batch:
        raise ValueError(f"units must share the batch size, got {batch} and {g_batch}")
    if ids is not None and ids != (batch, length):
        raise ValueError(f"expected ids of shape {(batch, length)}, got {tuple(ids)}")
    x_dtype = seen[0][2] if n_xs else None
    served = g_dtype in TRITON_DTYPES and (x_dtype is None or x_dtype in TRITON_DTYPES)
    row_major, apart, bits, ends = True, True, 0, 0
    segments: list[list[int]] = []
    for number, (shape, stride, dtype, low_bits) in enumerate(seen):
        if len(shape) != 3 or shape[:2] != (batch, length):
            raise ValueError(f"expected (B, T, features) with B, T = {(batch, length)}, got {tuple(shape)}")
        width, (stride_b, stride_t, stride_f) = shape[2], stride
        served = served and dtype == (x_dtype if number < n_xs else g_dtype)
        segments.append([0, width, stride_b, stride_t])
        bits |= low_bits | (stride_b | stride_t) * dtype.itemsize
        ends |= width * dtype.itemsize
        row_major = row_major and stride_f == 1
        apart = apart and stride_t >= width and stride_b != 0
    aligned = row_major and apart and bits % 16 == 0
    whole = aligned and ends % 16 == 0
    return UnitKind(length, x_dtype, g_dtype, served, aligned, whole, row_major, in_tf32), segments


# -- tiles -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GramTiles:
    """Tile sizes of a launch. block_s is a multiple of block_t.

    `tma`: tiles are read through tensor descriptors if rows are aligned.
    """

    block_t: int
    block_s: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool


def choose_tiles(kind: UnitKind, device: torch.device) -> GramTiles:
    """Choose the tiles of a launch, as measured on an H200 (bench_gram_norms.py, 2026-11-15) for layers of preset 1b.

    Half precision: 128×128×64, 8 warps, 4 stages, descriptors take 2.04 ms at B=16, T=256 (64×128×128: 2.9 ms) and
    22.7 ms at B=16, T=1024. float32, one unit of 2048 and 2048 features at B=8, T=1024: 64×64×32 with 4 warps and 3
    stages takes 0.53 ms, 128×64 0.60, 128×128 0.68, cuBLAS without tf32 1.23 (2026-11-15). The other choices are not
    measured: shorter samples use smaller tiles, and devices without descriptors or tensor cores use what fits.
    """
    hopper = is_hopper(device)
    tma = hopper and kind.aligned
    if kind.in_tf32 and hopper:
        return GramTiles(128, 128, 32, 8, 4, tma)
    if torch.float32 in (kind.x_dtype, kind.g_dtype):
        return GramTiles(64, 64, 32, 4, 3, tma)
    if kind.length <= 64:
        return GramTiles(64, 64, 64, 4, 3, tma)
    if not hopper:
        return GramTiles(128, 128, 32, 8, 3, tma=False)
    return GramTiles(128, 128, 64, 8, 4, tma)


@device_cache(64)
def tile_table_of(length: int, block_t: int, block_s: int, device: torch.device) -> tuple[Tensor, int]:
    """Return (i, j) of every tile that holds some t >= s, flat (i0, j0, i1, j1, …), and the number of tiles."""
    n_rows, n_cols = -(-length // block_t), -(-length // block_s)
    tiles = [(i, j) for i in range(n_rows) for j in range(n_cols) if (i + 1) * block_t > j * block_s]
    (table,) = table_on(device, [value for tile in tiles for value in tile], wait=True)
    return table, len(tiles)


def is_worth_aligning(kind: UnitKind, device: torch.device) -> bool:
    """Return True if an aligned copy pays off: each row is read T / block_t times, by the copy engine if aligned."""
    return kind.served and not kind.aligned and kind.g_dtype.itemsize == 2 and kind.length >= 128 and is_hopper(device)


# -- launches ----------------------------------------------------------------------------------------------------------


def launch_gram(
    plans: Sequence[KindPlan],
    units: Sequence[GramUnit],
    pointers: Integers,
    batch: int,
    device: torch.device,
    tiles: GramTiles | None,
) -> list[Tensor]:
    """Launch once for the units of each kind. Return (units, B) float64 for each kind."""
    rows: list[Integers] = []
    kept: list[Tensor] = []  # copies that must outlive the launches' enqueueing
    for plan in plans:
        with_pointers, numbers = plan.segments.copy(), plan.units.copy()
        with_pointers[:, 0] = pointers[plan.tensors]
        if plan.kind.x_dtype is None:
            ids = [units[member].ids.to(torch.int64).contiguous() for member in plan.members]  # type: ignore[union-attr]
            numbers[:, 0] = [each.data_ptr() for each in ids]
            kept += ids
        rows += (numbers.reshape(-1), with_pointers.reshape(-1))
    tables = table_on(device, *rows)  # in one copy
    return [
        _launch_kind(plan, units, of_units, segments, batch, device, tiles or choose_tiles(plan.kind, device))
        for plan, of_units, segments in zip(plans, tables[::2], tables[1::2], strict=True)
    ]


def _launch_kind(
    plan: KindPlan,
    units: Sequence[GramUnit],
    unit_table: Tensor,
    segments: Tensor,
    batch: int,
    device: torch.device,
    tiles: GramTiles,
) -> Tensor:
    """Return squared norms (units, B) in float64, without waiting for the device."""
    kind, members = plan.kind, plan.members
    tile_table, n_tiles = tile_table_of(kind.length, tiles.block_t, tiles.block_s, device)
    partials = torch.empty((3, len(members), batch, n_tiles), dtype=torch.float32, device=device)
    g_dtype = {"G_DTYPE": TRITON_DTYPES[kind.g_dtype]}
    x_dtype = {"X_DTYPE": None if kind.x_dtype is None else TRITON_DTYPES[kind.x_dtype]}
    kernel, dtypes = (_gram_ids_kernel, g_dtype) if kind.x_dtype is None else (_gram_kernel, x_dtype | g_dtype)
    tma = tiles.tma and kind.aligned
    if tma:
        provide_scratch(device)
    constants = {**dtypes, "BLOCK_T": tiles.block_t, "BLOCK_S": tiles.block_s, "BLOCK_K": tiles.block_k, "TMA": tma}
    constants |= {"ALIGNED": kind.whole and not INTERPRETED, "PRECISION": "tf32" if kind.in_tf32 else "tf32x3"}
    constants |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    arguments = (tile_table, unit_table, segments, partials, batch, n_tiles, kind.length)
    launch(kernel, len(members) * batch * n_tiles, arguments, constants, specialised=True)
    announce(
        lambda: Launch(
            name=kernel.__name__,
            family=CLIPPING,
            reads=[
                each for at in members for each in (*units[at].gs, *units[at].xs, units[at].ids) if each is not None
            ],
            writes=[partials],
            flops=batch * kind.length * (kind.length + 1) * plan.width,
        )
    )
    sums = partials.sum(3).contiguous()
    squares = torch.empty(sums.shape[1:], dtype=torch.float64, device=device)
    constants = {**x_dtype, **g_dtype, "BLOCK": 16, "K": 16, "num_warps": 4, "num_stages": 3}
    finished = (unit_table, segments, sums, squares, batch, kind.length)
    launch(_gram_finish_kernel, len(members) * batch, finished, constants, specialised=True)
    announce(lambda: Launch(name=_gram_finish_kernel.__name__, family=CLIPPING, reads=[sums], writes=[squares]))
    return squares

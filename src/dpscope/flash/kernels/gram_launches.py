"""Launches of the kernels of Gram norms: tables of units on the device, one launch a kind of unit, and its finish."""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.gram_kernels import _gram_finish_kernel, _gram_ids_kernel, _gram_kernel
from dpscope.flash.kernels.gram_tiles import GramTiles, tile_table_of
from dpscope.flash.kernels.gram_units import GramUnit, UnitKind, UnitRows, rows_of_unit
from dpscope.flash.kernels.triton_runtime import INTERPRETED, TRITON_DTYPES, launch_on, provide_scratch, table_on
from dpscope.vocabulary.families import CLIPPING
from dpscope.vocabulary.launches import Launch, announce


def _row_major(rows: UnitRows, kept: list[Tensor]) -> UnitRows:
    """The unit with copies of the tensors whose features do not lie side by side."""
    unit = rows.unit
    xs, gs = (tuple(x if x.stride(2) == 1 else x.contiguous() for x in side) for side in (unit.xs, unit.gs))
    kept += (*xs, *gs)
    return rows_of_unit(GramUnit(gs, xs, unit.ids, unit.padding_idx), gs[0].shape[0])[1]


class UnitTables(NamedTuple):
    """Units of one kind on the device: see the kernels. `kept`: copies that must outlive the launches' enqueueing."""

    units: Tensor
    segments: Tensor
    kept: list[Tensor]


def tables_of(kind: UnitKind, members: list[UnitRows], device: torch.device) -> UnitTables:
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
    return UnitTables(unit_table, segment_table, kept)


def _dtypes(kind: UnitKind) -> dict[str, Any]:
    return {
        "X_DTYPE": None if kind.x_dtype is None else TRITON_DTYPES[kind.x_dtype],
        "G_DTYPE": TRITON_DTYPES[kind.g_dtype],
    }


def launch_gram(kind: UnitKind, members: list[UnitRows], batch: int, device: torch.device, tiles: GramTiles) -> Tensor:
    """One launch for units of one kind: (B,) float64."""
    members.sort(key=lambda rows: -rows.width)  # heavy first: the tail of the grid is short
    tables = tables_of(kind, members, device)
    tile_table, n_tiles = tile_table_of(kind.length, tiles.block_t, tiles.block_s, device)
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
    return finish_on_device(kind, tables, partials.sum(3))


def finish_on_device(kind: UnitKind, tables: UnitTables, sums: Tensor) -> Tensor:
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

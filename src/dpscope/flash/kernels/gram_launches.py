"""Launches of the kernels of Gram norms: tables of units on the device, one launch a kind of unit, and its finish."""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.gram_kernels import _gram_finish_kernel, _gram_ids_kernel, _gram_kernel
from dpscope.flash.kernels.gram_tiles import GramTiles, choose_tiles, tile_table_of
from dpscope.flash.kernels.gram_units import GramUnit, Integers, KindPlan, UnitKind
from dpscope.flash.kernels.triton_runtime import INTERPRETED, TRITON_DTYPES, launch_on, provide_scratch, table_on
from dpscope.vocabulary.families import CLIPPING
from dpscope.vocabulary.launches import Launch, announce


class UnitTables(NamedTuple):
    """Units of one kind on the device: see the kernels. `kept`: copies that must outlive the launches' enqueueing."""

    units: Tensor
    segments: Tensor
    kept: list[Tensor]


def _tables_of(
    plans: Sequence[KindPlan], units: Sequence[GramUnit], pointers: Integers, device: torch.device
) -> list[UnitTables]:
    """Build the tables of all plans and copy them to the device at once."""
    rows: list[Integers] = []
    kept: list[list[Tensor]] = []
    for plan in plans:
        segments, of_units = plan.segments.copy(), plan.units.copy()
        segments[:, 0] = pointers[plan.tensors]
        ids = [units[member].ids for member in plan.members]
        kept.append([each.to(torch.int64).contiguous() for each in ids if each is not None])
        if kept[-1]:
            of_units[:, 0] = [each.data_ptr() for each in kept[-1]]
        rows += (of_units.reshape(-1), segments.reshape(-1))
    tables = table_on(device, *rows)
    return [UnitTables(*each) for each in zip(tables[::2], tables[1::2], kept, strict=True)]


def _dtypes(kind: UnitKind) -> dict[str, Any]:
    return {
        "X_DTYPE": None if kind.x_dtype is None else TRITON_DTYPES[kind.x_dtype],
        "G_DTYPE": TRITON_DTYPES[kind.g_dtype],
    }


def launch_gram(
    plans: Sequence[KindPlan],
    units: Sequence[GramUnit],
    pointers: Integers,
    batch: int,
    device: torch.device,
    tiles: GramTiles | None,
) -> list[Tensor]:
    """Launch once for the units of each kind. Return (units, B) float64 for each kind."""
    tables = _tables_of(plans, units, pointers, device)
    return [
        _launch_kind(plan, units, of_kind, batch, device, tiles or choose_tiles(plan.kind, device))
        for plan, of_kind in zip(plans, tables, strict=True)
    ]


def _launch_kind(
    plan: KindPlan,
    units: Sequence[GramUnit],
    tables: UnitTables,
    batch: int,
    device: torch.device,
    tiles: GramTiles,
) -> Tensor:
    kind, members = plan.kind, plan.members
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
            PRECISION="tf32" if kind.in_tf32 else "tf32x3",
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    announce(
        lambda: Launch(
            name=kernel.__name__,
            family=CLIPPING,
            reads=[tensor for member in members for tensor in _read_of(units[member])],
            writes=[partials],
            flops=batch * kind.length * (kind.length + 1) * plan.width,
        )
    )
    return _finish_on_device(kind, tables, partials.sum(3))


def _read_of(unit: GramUnit) -> list[Tensor]:
    return [*unit.gs, *unit.xs, *([] if unit.ids is None else [unit.ids])]


def _finish_on_device(kind: UnitKind, tables: UnitTables, sums: Tensor) -> Tensor:
    """Turn sums (3, units, B) into squared norms (units, B) in float64, without waiting for the device."""
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
    return squares

"""Memory of a row: what the bytes of its peak were for, and how they came and went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dpscope.reports.tables import Row, once_a_row
from dpscope.results.memory import Composition, Timeline, composition_in, timeline_in
from dpscope.results.payloads.memory import TensorsAtPeak
from dpscope.units import MIB
from dpscope.vocabulary.components import in_order
from dpscope.vocabulary.methods import STANDARD


def present(held: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the components that hold anything, in the order of stacking."""
    return in_order(key for each in held for key, count in each.items() if count)


@once_a_row
def composition_of(row: Row) -> Composition | None:
    """Return what the peak was made of; None if no instrument saw it."""
    return row.first_of(composition_in)


def described_of(rows: Iterable[Row]) -> dict[Row, Composition]:
    """Return the rows whose peaks have a composition."""
    return {row: composition for row in rows if (composition := composition_of(row))}


def undescribed(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """Return the others, and why they have none."""
    return [(row, row.why_none("no breakdown by component was measured")) for row in rows if not composition_of(row)]


def standard_of(described: Mapping[Row, Composition]) -> Composition | None:
    return next((composition for row, composition in described.items() if row.method == STANDARD), None)


@once_a_row
def timeline_of(row: Row) -> Timeline | None:
    """Return the timeline of a row; None if there is none that can be drawn."""
    return row.first_of(lambda result: timeline_in(result.timeline))


def snapshots_of(row: Row) -> dict[str, float]:
    """Return the named stages of a run and the bytes that were allocated at each."""
    taken = row.first_of(lambda result: result.snapshots) or []
    return {stage["name"]: stage["allocated_mb"] * MIB for stage in taken}


def tensors_of(row: Row) -> TensorsAtPeak | None:
    """Return the tensors at the peak; None if the file has none, as in older versions."""
    tensors = row.first_of(lambda result: result.memory.get("tensors"))
    return tensors if tensors and tensors["largest"] else None

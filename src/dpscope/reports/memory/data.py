"""What the bytes of a row's peak were for, and how they came and went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from dpscope.reports.tables import Row, once_a_row
from dpscope.results.payloads.memory import Remainder, TensorsAtPeak, TimelinePayload
from dpscope.results.schema import Result
from dpscope.units import MIB
from dpscope.vocabulary.components import UNATTRIBUTED, in_order
from dpscope.vocabulary.methods import STANDARD

TOTALS = ("total_allocated_mb", "peak_allocated_mb")  # in a breakdown, but no components

Value = TypeVar("Value")


@dataclass(frozen=True)
class Composition:
    """A row's peak, component by component, in bytes. The components sum to the peak."""

    components: Mapping[str, float]
    phase: str | None = None
    operator: str | None = None
    module: str | None = None
    modules: list[tuple[str, dict[str, int]]] = field(default_factory=list)  # heaviest first
    unattributed: list[Remainder] = field(default_factory=list)  # what is known about the rest

    @property
    def total(self) -> float:
        return sum(self.components.values())

    def extra_over(self, other: Composition) -> dict[str, float]:
        """Bytes of each component beyond another's; below zero where this one holds less."""
        keys = in_order([*self.components, *other.components])
        return {key: self.components.get(key, 0.0) - other.components.get(key, 0.0) for key in keys}

    def ratio_to(self, standard: Composition | None) -> float | None:
        return self.total / standard.total if standard and standard.total > 0 else None

    @property
    def maker(self) -> str | None:
        """What reached the peak: `backward: aten::bmm in blocks.3.up`."""
        what = " in ".join(filter(None, (self.operator, self.module)))
        return ": ".join(filter(None, (self.phase, what))) or None


class PhaseSpan(NamedTuple):
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes of each component after every event of one step."""

    events: list[int]
    levels: dict[str, list[int]]  # component -> bytes, one for each event
    phases: list[PhaseSpan]

    @cached_property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.levels.values(), strict=True)]

    @property
    def highest(self) -> dict[str, int]:
        """The most that each component holds."""
        return {key: max(level) for key, level in self.levels.items()}

    @cached_property
    def peak(self) -> int:
        """The index of the first event with the most live bytes."""
        return self.totals.index(max(self.totals))


def present(held: Iterable[Mapping[str, float]]) -> list[str]:
    """The components of which anything was held, as they are stacked."""
    return in_order(key for each in held for key, count in each.items() if count)


@once_a_row
def composition_of(row: Row) -> Composition | None:
    """None where no instrument saw what the peak was made of."""
    return row.first_of(_composition)


def described_of(rows: Iterable[Row]) -> dict[Row, Composition]:
    """The rows whose peaks have a composition."""
    return {row: composition for row in rows if (composition := composition_of(row))}


def undescribed(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """The others, and why they have none."""
    return [(row, row.why_none("no breakdown by component was measured")) for row in rows if not composition_of(row)]


def standard_of(described: Mapping[Row, Composition]) -> Composition | None:
    return next((composition for row, composition in described.items() if row.method == STANDARD), None)


@once_a_row
def timeline_of(row: Row) -> Timeline | None:
    """None where there is no timeline, or none that can be drawn."""
    return row.first_of(lambda result: _timeline(result.timeline))


def snapshots_of(row: Row) -> dict[str, float]:
    """The named stages of a run and the bytes that were allocated at each."""
    taken = row.first_of(lambda result: result.snapshots) or []
    return {stage["name"]: stage["allocated_mb"] * MIB for stage in taken}


def tensors_of(row: Row) -> TensorsAtPeak | None:
    """None where a file has none: older ones have not."""
    tensors = row.first_of(lambda result: result.memory.get("tensors"))
    return tensors if tensors and tensors["largest"] else None


def _composition(result: Result) -> Composition | None:
    peak = result.memory.get("peak")
    if peak and peak["components"]:
        modules = [(each["module"], _sorted(each["components"])) for each in result.memory.get("modules", [])]
        return Composition(
            _sorted(peak["components"]),
            *(peak["phase"] or None, peak["operator"] or None, peak["module"] or None),
            sorted(modules, key=lambda entry: -sum(entry[1].values())),
            result.memory.get("unattributed", []),
        )
    # From the `_mb` keys that older files have. What they leave open of the peak is unattributed.
    breakdown = result.breakdown
    parts = {key.removesuffix("_mb"): value * MIB for key, value in breakdown.items() if key not in TOTALS}
    total = MIB * (breakdown.get("peak_allocated_mb") or breakdown.get("total_allocated_mb") or 0.0)
    if parts and UNATTRIBUTED not in parts and total:
        parts[UNATTRIBUTED] = total - sum(parts.values())
    return Composition(_sorted(parts)) if parts else None


def _timeline(payload: TimelinePayload) -> Timeline | None:
    keys, points = payload.get("components"), payload.get("points", [])
    if not keys or len(points) < 2 or any(len(point) != len(keys) + 1 for point in points):
        return None
    events, *levels = (list(column) for column in zip(*points, strict=True))
    if any(later < earlier for earlier, later in pairwise(events)):
        return None
    first, last = events[0], events[-1]
    phases = [PhaseSpan(p["name"], max(p["start"], first), min(p["end"], last)) for p in payload.get("phases", [])]
    known = sorted((phase for phase in phases if phase.end >= phase.start), key=lambda phase: phase.start)
    return Timeline(events, _sorted(dict(zip(keys, levels, strict=True))), known)


def _sorted(components: Mapping[str, Value]) -> dict[str, Value]:
    return {key: components[key] for key in in_order(components)}

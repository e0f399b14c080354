"""What the bytes of a row's peak were for, and how they came and went: read from results with suspicion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dpscope.reports.tables import Row
from dpscope.results.schema import Result
from dpscope.units import MIB
from dpscope.vocabulary.components import COMPONENTS, UNATTRIBUTED
from dpscope.vocabulary.statuses import status_named

KNOWN = {component.key: component for component in COMPONENTS}
TOTALS = ("total_allocated_mb", "peak_allocated_mb")  # in a breakdown, but no components


@dataclass(frozen=True)
class Composition:
    """A row's peak, component by component, in bytes. The components sum to the peak."""

    components: dict[str, float]
    phase: str | None = None
    operator: str | None = None
    module: str | None = None
    modules: list[tuple[str, dict[str, float]]] = field(default_factory=list)  # heaviest first
    unattributed: list[tuple[str, float]] = field(default_factory=list)  # what is known about the rest

    @property
    def total(self) -> float:
        return sum(self.components.values())

    def extra_over(self, other: Composition) -> dict[str, float]:
        """Bytes of each component beyond another's; below zero where this one holds less."""
        return {
            key: self.components.get(key, 0.0) - other.components.get(key, 0.0)
            for key in in_order([*self.components, *other.components])
        }

    @property
    def maker(self) -> str | None:
        """What reached the peak: `backward: aten::bmm in blocks.3.up`."""
        what = " in ".join(part for part in (self.operator, self.module) if part)
        return ": ".join(part for part in (self.phase, what) if part) or None


@dataclass(frozen=True)
class Phase:
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Live bytes of each component after every event of one step."""

    events: list[float]
    levels: dict[str, list[float]]  # component -> bytes, one for each event
    phases: list[Phase]

    @property
    def totals(self) -> list[float]:
        return [sum(values) for values in zip(*self.levels.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The index of the first event with the most live bytes."""
        totals = self.totals
        return totals.index(max(totals))


def label_of(key: str) -> str:
    """A component in words; one that a user's own rule named keeps its name."""
    return KNOWN[key].label if key in KNOWN else key.replace("_", " ")


def is_private_only(key: str) -> bool:
    return key in KNOWN and KNOWN[key].private_only


def in_order(keys: Iterable[str]) -> list[str]:
    """Components as they are stacked and listed: the known ones, users' own, and what is left."""
    places = {key: place for place, key in enumerate(KNOWN)}
    last = places[UNATTRIBUTED]
    return sorted(dict.fromkeys(keys), key=lambda key: (places.get(key, last - 0.5), key))


def composition_of(row: Row) -> Composition | None:
    """None where no instrument saw what the peak was made of."""
    for result in row.measured.values():
        if result.ok and (components := _tracked(result) or _broken_down(result)):
            peak = result.memory.get("peak")
            told = peak if isinstance(peak, dict) else {}
            phase, operator, module = (str(told.get(name) or "") or None for name in ("phase", "operator", "module"))
            return Composition(components, phase, operator, module, _modules(result), _remainder(result))
    return None


def why_no_composition(row: Row) -> str:
    if row.result.ok:
        return "no breakdown by component was measured"
    return status_named(row.result.status).instead


def timeline_of(row: Row) -> Timeline | None:
    """None where there is no timeline, or none that can be drawn."""
    for result in row.measured.values():
        if result.ok and (timeline := _timeline(result.timeline)):
            return timeline
    return None


def snapshots_of(row: Row) -> list[tuple[str, float]]:
    """The named stages of a run and the bytes that were allocated at each."""
    for result in row.measured.values():
        stages = [stage for stage in result.snapshots if isinstance(stage, dict)] if result.ok else []
        if named := [
            (str(stage["name"]), stage["allocated_mb"] * MIB)
            for stage in stages
            if "name" in stage and _is_number(stage.get("allocated_mb"))
        ]:
            return named
    return []


def _tracked(result: Result) -> dict[str, float]:
    peak = result.memory.get("peak")
    components = peak.get("components") if isinstance(peak, dict) else None
    return _numbers(components) if isinstance(components, dict) else {}


def _broken_down(result: Result) -> dict[str, float]:
    """From the `_mb` keys that older files have. What they leave open of the peak is unattributed."""
    stated = {key: value * MIB for key, value in result.breakdown.items() if _is_number(value) and value >= 0}
    parts = _numbers({key.removesuffix("_mb"): value for key, value in stated.items() if key not in TOTALS})
    total = stated.get("peak_allocated_mb") or stated.get("total_allocated_mb")
    if not parts or UNATTRIBUTED in parts or not total:
        return parts
    return {**parts, UNATTRIBUTED: total - sum(parts.values())}


def _modules(result: Result) -> list[tuple[str, dict[str, float]]]:
    listed = result.memory.get("modules")
    modules = [
        (str(entry["module"]), _numbers(entry["components"]))
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and "module" in entry and isinstance(entry.get("components"), dict)
    ]
    return sorted(modules, key=lambda entry: -sum(entry[1].values()))


def _remainder(result: Result) -> list[tuple[str, float]]:
    listed = result.memory.get(UNATTRIBUTED)
    return [
        (str(entry["what"]), entry["bytes"])
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and "what" in entry and _is_number(entry.get("bytes"))
    ]


def _timeline(data: Mapping[str, Any]) -> Timeline | None:
    keys, points = data.get("components"), data.get("points")
    if not isinstance(keys, list) or not isinstance(points, list) or not keys or len(points) < 2:
        return None
    if not all(_is_row(point, len(keys) + 1) for point in points):
        return None
    events, *levels = (list(column) for column in zip(*points, strict=True))
    if any(later < earlier for earlier, later in pairwise(events)):
        return None
    by_key = dict(zip(map(str, keys), levels, strict=True))
    return Timeline(events, {key: by_key[key] for key in in_order(by_key)}, _phases(data.get("phases"), events))


def _phases(listed: object, events: Sequence[float]) -> list[Phase]:
    phases = [
        Phase(str(entry["name"]), max(entry["start"], events[0]), min(entry["end"], events[-1]))
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict)
        and "name" in entry
        and _is_number(entry.get("start"))
        and _is_number(entry.get("end"))
    ]
    return sorted((phase for phase in phases if phase.end >= phase.start), key=lambda phase: phase.start)


def _numbers(components: Mapping[str, Any]) -> dict[str, float]:
    """What can be added up. Only the remainder may be below zero: the tracker then saw more than the allocator."""
    kept = {
        str(key): value
        for key, value in components.items()
        if _is_number(value) and (value >= 0 or key == UNATTRIBUTED)
    }
    return {key: kept[key] for key in in_order(kept)}


def _is_row(point: object, length: int) -> bool:
    return isinstance(point, list) and len(point) == length and all(map(_is_number, point))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

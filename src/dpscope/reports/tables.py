"""Results side by side, with `standard` as the denominator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpscope.results.schema import Result
from dpscope.units import MIB

STANDARD = "standard"

# A row whose 90th percentile is this much above its 10th was measured on a busy machine: its ratios mean little.
STEADY = 1.5


# Ten timed steps and a tracked one are two ways to look at one row.
REPEATS = ("warmup", "steps")
HOW_IT_WAS_LOOKED_AT = ("method", "instrument", "options", *REPEATS)


@dataclass(frozen=True)
class Row:
    """One method on one workload at one size: what every instrument saw of it, and its ratios to ordinary training."""

    measured: dict[str, Result]  # instrument -> result
    time_ratio: float | None
    memory_ratio: float | None
    steady: bool = True  # neither this row's times nor standard's varied by more than STEADY
    apart: tuple[tuple[str, Any], ...] = ()  # (warmup, steps) by name, where the same was measured with several of them
    methods: tuple[str, ...] = ()  # all that the results hold: they are told apart by how they look

    @property
    def result(self) -> Result:
        """The one to describe the row by: a measurement that failed, or else the first."""
        return next((result for result in self.measured.values() if not result.ok), self.first)

    @property
    def first(self) -> Result:
        return next(iter(self.measured.values()))

    @property
    def looked_at(self) -> dict[str, Any]:
        """The spec whose numbers of steps are worth telling: that of the times."""
        return self.measured.get("time", self.first).spec

    @property
    def repeats(self) -> dict[str, Any]:
        return dict(self.apart) or {name: self.looked_at.get(name) for name in REPEATS}

    @property
    def method(self) -> str:
        return self.first.experiment

    @property
    def timing(self) -> dict[str, Any]:
        return self._part("timing")

    @property
    def memory(self) -> dict[str, Any]:
        """What the memory instrument saw, where it looked: a step's peak. Otherwise the peak beside the times."""
        seen = self.measured.get("memory")
        return seen.memory if seen is not None and seen.memory else self._part("memory")

    @property
    def ncu(self) -> dict[str, Any]:
        return self._part("ncu")

    @property
    def median_ms(self) -> float | None:
        """The median; the mean where a file of an older consumer has no more than that."""
        return figure_of(self.timing.get("median_ms"), self._value("avg_time_ms"))

    @property
    def spread_ms(self) -> tuple[float, float] | None:
        low, high = (figure_of(self.timing.get(name)) for name in ("p10_ms", "p90_ms"))
        return None if low is None or high is None else (low, high)

    @property
    def peak_bytes(self) -> float | None:
        stated = figure_of(self._value("peak_memory_mb"))
        return figure_of(self.memory.get("peak_bytes"), None if stated is None else stated * MIB)

    @property
    def notes(self) -> list[str]:
        """What is worth knowing beside the figures, each sentence once."""
        return list(dict.fromkeys(note["sentence"] for result in self.measured.values() for note in result.notes))

    @property
    def size(self) -> tuple[Any, ...]:
        """What has to be equal for two rows to be compared."""
        return (*comparison_key(self.first), *self.apart)

    def _value(self, name: str) -> float | None:
        values: Iterable[float | None] = (getattr(result, name) for result in self.measured.values() if result.ok)
        return next((value for value in values if value is not None), None)

    def _part(self, name: str) -> dict[str, Any]:
        parts: Iterable[dict[str, Any]] = (getattr(result, name) for result in self.measured.values() if result.ok)
        return next((part for part in parts if part), {})


def figure_of(*candidates: Any) -> float | None:
    """The first that is a number, and one that can be measured: finite, and not below zero."""
    numbers = (value for value in candidates if isinstance(value, int | float) and not isinstance(value, bool))
    return next((value for value in numbers if math.isfinite(value) and value >= 0), None)


def comparison_key(result: Result) -> tuple[Any, ...]:
    """Everything in the spec but the method and how it was looked at."""
    spec = {name: value for name, value in result.spec.items() if name not in HOW_IT_WAS_LOOKED_AT}
    return (repr(sorted(spec.pop("workload").items())), *sorted(spec.items()))


def compare_results(results: Iterable[Result]) -> list[Row]:
    """A row for each method at each size, in order of first appearance."""
    rows = join_instruments(list(results))
    standards = {row.size: row for row in rows if row.method == STANDARD}
    methods = tuple(dict.fromkeys(row.method for row in rows))
    return [replace(_with_ratios(row, standards.get(row.size)), methods=methods) for row in rows]


def join_instruments(results: Sequence[Result]) -> list[Row]:
    """What was measured of the same method at the same size, together; in order of first appearance.

    Numbers of steps keep rows apart only where one instrument looked with several of them; what another saw, with
    one number of steps, belongs to each of those rows.
    """
    several = _several_repeats(results)
    joined: dict[tuple[Any, ...], list[Row]] = {}
    for result in results:
        key = comparison_key(result)
        instruments = several.get(key, {})
        every = dict.fromkeys(apart for repeats in instruments.values() for apart in repeats) or [()]
        for apart in [_repeats(result)] if result.instrument in instruments else every:
            places = joined.setdefault((result.experiment, *key, *apart), [])
            free = next((row for row in places if result.instrument not in row.measured), None)
            if free is None:
                places.append(Row({result.instrument: result}, None, None, apart=apart))
            else:
                free.measured[result.instrument] = result
    return [row for places in joined.values() for row in places]


Repeats = tuple[tuple[str, Any], ...]


def _several_repeats(results: Sequence[Result]) -> dict[tuple[Any, ...], dict[str, dict[Repeats, None]]]:
    """Comparison -> instruments that looked at one method with several numbers of steps, and those."""
    found: dict[tuple[Any, ...], dict[Repeats, None]] = {}
    for result in results:
        found.setdefault((result.experiment, result.instrument, comparison_key(result)), {})[_repeats(result)] = None
    several: dict[tuple[Any, ...], dict[str, dict[Repeats, None]]] = {}
    for (_, instrument, key), repeats in found.items():
        if len(repeats) > 1:
            several.setdefault(key, {}).setdefault(instrument, {}).update(repeats)
    return several


def _repeats(result: Result) -> Repeats:
    return tuple((name, result.spec.get(name)) for name in REPEATS)


def _with_ratios(row: Row, standard: Row | None) -> Row:
    if standard is None:
        return replace(row, steady=is_steady(row.spread_ms))
    return replace(
        row,
        time_ratio=_ratio(row.median_ms, standard.median_ms),
        memory_ratio=_ratio(row.peak_bytes, standard.peak_bytes),
        steady=all(is_steady(r.spread_ms) for r in (row, standard)),
    )


def seen_once(rows: Iterable[Row], instrument: str) -> list[Row]:
    """Without rows that would tell again what the instrument saw of an earlier one."""
    seen: set[int] = set()
    kept = []
    for row in rows:
        result = row.measured.get(instrument)
        if result is None or id(result) not in seen:
            kept.append(row)
            seen.add(id(result))
    return kept


def is_steady(spread: tuple[float, float] | None) -> bool:
    return spread is None or spread[1] <= STEADY * spread[0]


def _ratio(value: float | None, denominator: float | None) -> float | None:
    if value is None or denominator is None or denominator <= 0 or value <= 0:
        return None
    return value / denominator


def group_by_size(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that are compared with each other, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.size, []).append(row)
    return list(groups.values())


def varying_columns(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The spec fields that differ between rows: only those are worth a column."""
    return [name for name in names if len({repr(row.first.spec.get(name)) for row in rows}) > 1]

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


@dataclass(frozen=True)
class Row:
    """One method on one workload at one size: what every instrument saw of it, and its ratios to ordinary training."""

    measured: dict[str, Result]  # instrument -> result
    time_ratio: float | None
    memory_ratio: float | None
    steady: bool = True  # neither this row's times nor standard's varied by more than STEADY

    @property
    def result(self) -> Result:
        """The one to describe the row by: a measurement that failed, or else the first."""
        return next((result for result in self.measured.values() if not result.ok), self.first)

    @property
    def first(self) -> Result:
        return next(iter(self.measured.values()))

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
        return _figure(self.timing.get("median_ms"), self._value("avg_time_ms"))

    @property
    def spread_ms(self) -> tuple[float, float] | None:
        low, high = (_figure(self.timing.get(name)) for name in ("p10_ms", "p90_ms"))
        return None if low is None or high is None else (low, high)

    @property
    def peak_bytes(self) -> float | None:
        stated = _figure(self._value("peak_memory_mb"))
        return _figure(self.memory.get("peak_bytes"), None if stated is None else stated * MIB)

    @property
    def size(self) -> tuple[Any, ...]:
        """What has to be equal for two rows to be compared."""
        return comparison_key(self.first)

    def _value(self, name: str) -> float | None:
        values: Iterable[float | None] = (getattr(result, name) for result in self.measured.values() if result.ok)
        return next((value for value in values if value is not None), None)

    def _part(self, name: str) -> dict[str, Any]:
        parts: Iterable[dict[str, Any]] = (getattr(result, name) for result in self.measured.values() if result.ok)
        return next((part for part in parts if part), {})


def _figure(*candidates: Any) -> float | None:
    """The first that is a number, and one that can be measured: finite, and not below zero."""
    numbers = (value for value in candidates if isinstance(value, int | float) and not isinstance(value, bool))
    return next((value for value in numbers if math.isfinite(value) and value >= 0), None)


def comparison_key(result: Result) -> tuple[Any, ...]:
    """Everything in the spec but the method and how it was looked at."""
    spec = {name: value for name, value in result.spec.items() if name not in ("method", "instrument", "options")}
    return (repr(sorted(spec.pop("workload").items())), *sorted(spec.items()))


def join_instruments(results: Iterable[Result]) -> list[dict[str, Result]]:
    """What was measured of the same method at the same size, together; in order of first appearance."""
    joined: dict[tuple[Any, ...], list[dict[str, Result]]] = {}
    for result in results:
        places = joined.setdefault((result.experiment, *comparison_key(result)), [])
        free = next((place for place in places if result.instrument not in place), None)
        if free is None:
            places.append({result.instrument: result})
        else:
            free[result.instrument] = result
    return [place for places in joined.values() for place in places]


def compare_results(results: Iterable[Result]) -> list[Row]:
    """A row for each method at each size, in order of first appearance."""
    rows = [Row(measured, None, None) for measured in join_instruments(results)]
    standards = {row.size: row for row in rows if row.method == STANDARD}
    return [_with_ratios(row, standards.get(row.size)) for row in rows]


def _with_ratios(row: Row, standard: Row | None) -> Row:
    if standard is None:
        return replace(row, steady=_is_steady(row.spread_ms))
    return replace(
        row,
        time_ratio=_ratio(row.median_ms, standard.median_ms),
        memory_ratio=_ratio(row.peak_bytes, standard.peak_bytes),
        steady=all(_is_steady(r.spread_ms) for r in (row, standard)),
    )


def _is_steady(spread: tuple[float, float] | None) -> bool:
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

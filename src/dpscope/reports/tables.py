"""Results side by side, with `standard` as the denominator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.results.schema import Result

STANDARD = "standard"

# A row whose 90th percentile is this much above its 10th was measured on a busy machine: its ratios mean little.
STEADY = 1.5


@dataclass(frozen=True)
class Row:
    """One measurement and its ratios to ordinary training of the same workload at the same size."""

    result: Result
    time_ratio: float | None
    memory_ratio: float | None
    steady: bool = True  # neither this row's times nor standard's varied by more than STEADY

    @property
    def method(self) -> str:
        return self.result.experiment

    @property
    def median_ms(self) -> float | None:
        return self.result.timing.get("median_ms")

    @property
    def spread_ms(self) -> tuple[float, float] | None:
        timing = self.result.timing
        return (timing["p10_ms"], timing["p90_ms"]) if "p10_ms" in timing else None

    @property
    def peak_bytes(self) -> float | None:
        return self.result.memory.get("peak_bytes")

    @property
    def size(self) -> tuple[Any, ...]:
        """What has to be equal for two rows to be compared: everything in the spec but the method."""
        return comparison_key(self.result)


def comparison_key(result: Result) -> tuple[Any, ...]:
    spec = {name: value for name, value in result.spec.items() if name != "method"}
    workload = tuple(sorted(spec.pop("workload").items()))
    return (workload, *sorted(spec.items()))


def compare_results(results: Iterable[Result]) -> list[Row]:
    """A row for each result, in the same order."""
    ordered = list(results)
    standards = {comparison_key(r): r for r in ordered if r.experiment == STANDARD and r.ok}
    return [_row(result, standards.get(comparison_key(result))) for result in ordered]


def _row(result: Result, standard: Result | None) -> Row:
    if standard is None or not result.ok:
        return Row(result, None, None)
    return Row(
        result,
        _ratio(result.timing.get("median_ms"), standard.timing.get("median_ms")),
        _ratio(result.memory.get("peak_bytes"), standard.memory.get("peak_bytes")),
        steady=all(_is_steady(r.timing) for r in (result, standard)),
    )


def _is_steady(timing: dict[str, Any]) -> bool:
    return "p10_ms" not in timing or bool(timing["p90_ms"] <= STEADY * timing["p10_ms"])


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
    return [name for name in names if len({repr(row.result.spec.get(name)) for row in rows}) > 1]

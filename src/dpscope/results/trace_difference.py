"""Difference of two traced steps, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dpscope.results.payloads.trace import TracePayload

GPU, CPU = "gpu", "cpu"
IDLE = "GPU idle"
OUTSIDE = "outside operators (Python, hooks, the profiler)"
SIDE_BY_SIDE = "less: work side by side on several streams"

OperatorInPhase = tuple[str, str]  # operator, phase


@dataclass(frozen=True)
class OperatorChange:
    """Milliseconds that an operator in a phase takes in one method's step and in standard's."""

    operator: str
    phase: str  # empty for what no operator accounts for
    before_ms: float
    after_ms: float
    kind: str  # new: standard does not do it in any phase; gone: only standard does

    @property
    def ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass(frozen=True)
class StepDifference:
    """Difference of a method's traced step from standard's. The changes sum to `total_ms`."""

    method: str
    basis: str
    total_ms: float
    changes: list[OperatorChange]  # most milliseconds first; the last lines are what no operator accounts for
    doubt: str  # what makes its total, and all time on the host, doubtful

    def biggest(self, most: int) -> tuple[list[OperatorChange], float, int]:
        """Return the largest changes either way, longest first, then the sum and the number of all others."""
        kept = sorted(self.changes, key=lambda change: -abs(change.ms))[:most]
        rest = self.total_ms - sum(change.ms for change in kept)
        return sorted(kept, key=lambda change: -change.ms), rest, len(self.changes) - len(kept)


def compare_traces(method: str, trace: TracePayload, standard: TracePayload, *, doubt: str) -> StepDifference:
    """Compare GPU time if both were traced on a GPU, else self time on the host."""
    traces = (standard, trace)
    basis = GPU if all(each.get("gpu") for each in traces) else CPU
    clock: Literal["gpu_ms", "self_cpu_ms"] = "gpu_ms" if basis == GPU else "self_cpu_ms"
    then, now = (
        {(line["operator"], line["phase"]): ms for line in each["operators"] if (ms := line[clock])} for each in traces
    )
    rest_then, rest_now = (_rest(each, basis) for each in traces)
    changes = [
        OperatorChange(*key, then.get(key, 0.0), now.get(key, 0.0), _kind(key, then, now))
        for key in dict.fromkeys([*now, *then])
    ]
    ordered = sorted((change for change in changes if change.ms), key=lambda change: -change.ms)
    rest = [OperatorChange(what, "", rest_then[what], rest_now[what], "grew") for what in rest_now]
    total = trace["step_ms"] - standard["step_ms"]
    return StepDifference(method, basis, total, [*ordered, *rest], doubt)


def _rest(trace: TracePayload, basis: str) -> dict[str, float]:
    """Return the part of the step time that is not in operators."""
    if basis == CPU:
        return {OUTSIDE: trace["outside_operators_ms"]}
    return {IDLE: trace["gpu"]["idle_ms"], SIDE_BY_SIDE: -trace["gpu"]["overlap_ms"]}


def _kind(key: OperatorInPhase, then: Mapping[OperatorInPhase, float], now: Mapping[OperatorInPhase, float]) -> str:
    operator, phase = key
    if key not in then:
        return f"new in {phase}" if operator in {name for name, _ in then} else "new"
    if key not in now:
        return f"gone from {phase}" if operator in {name for name, _ in now} else "gone"
    return "grew" if now[key] >= then[key] else "shrank"

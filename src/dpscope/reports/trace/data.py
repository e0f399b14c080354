"""Difference of two traced steps, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dpscope.reports.looks import in_longest_order
from dpscope.reports.tables import MARK, STRETCHED, Row, group_by_size, once_a_row
from dpscope.results.payloads.trace import GpuTime, TracePayload
from dpscope.units import format_ratio

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
    rest_then, rest_now = (  # what of the step's time is not in operators
        {OUTSIDE: each["outside_operators_ms"]}
        if basis == CPU
        else {IDLE: each["gpu"]["idle_ms"], SIDE_BY_SIDE: -each["gpu"]["overlap_ms"]}
        for each in traces
    )
    changes = [
        OperatorChange(*key, then.get(key, 0.0), now.get(key, 0.0), _kind(key, then, now))
        for key in dict.fromkeys([*now, *then])
    ]
    ordered = sorted((change for change in changes if change.ms), key=lambda change: -change.ms)
    rest = [OperatorChange(what, "", rest_then[what], rest_now[what], "grew") for what in rest_now]
    total = trace["step_ms"] - standard["step_ms"]
    return StepDifference(method, basis, total, [*ordered, *rest], doubt)


def _kind(key: OperatorInPhase, then: Mapping[OperatorInPhase, float], now: Mapping[OperatorInPhase, float]) -> str:
    operator, phase = key
    if key not in then:
        return f"new in {phase}" if operator in {name for name, _ in then} else "new"
    if key not in now:
        return f"gone from {phase}" if operator in {name for name, _ in now} else "gone"
    return "grew" if now[key] >= then[key] else "shrank"


# A GPU that works for less than this part of an unprofiled step waits for the host.
BUSY_ENOUGH = 0.8

Series = dict[str, list[float | None]]  # phase or family -> milliseconds, one for each method


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A row with its trace."""

    row: Row
    trace: TracePayload
    method: str
    gpu: GpuTime | None
    step_ms: float  # without the profiler, if known
    stretch: float  # traced step time over unprofiled step time; 0 if that is not known

    def phase_times(self, *, gpu: bool) -> dict[str, float]:
        """Return host time, or GPU time and the rest of the unprofiled step."""
        times = {part["phase"]: part["gpu_ms"] if gpu else part["cpu_ms"] for part in self.trace["phases"]}
        return times | ({IDLE: max(self.step_ms - sum(times.values()), 0.0)} if gpu else {})

    @cached_property
    def difference(self) -> StepDifference | None:
        """Difference to ordinary training; None for itself, or if that was not traced."""
        standard = self.row.standard
        other = None if standard is None or standard is self.row else traced_step(standard)
        if other is None:
            return None
        return compare_traces(self.method, self.trace, other.trace, doubt=stretched_in_words([other, self]))

    @property
    def bound(self) -> str:
        """Verdict on whether the GPU waits for the host; empty without a GPU.

        It is busy time over unprofiled time, because the profiler slows the host and not the kernels.
        """
        if self.gpu is None or not self.step_ms:
            return ""
        share = min(self.gpu["busy_ms"] / self.step_ms, 1.0)
        step = "the unprofiled step" if self.row.median_ms else "the traced step, which the profiler makes longer"
        how = f"launch-bound: the GPU works in {share:.0%} of {step}"
        return f"{how}; the rest it waits for the host" if share < BUSY_ENOUGH else f"not {how}"


@once_a_row
def traced_step(row: Row) -> TracedStep | None:
    """Return the traced step of a row; None if the trace instrument was not used, or failed."""
    result = row.measured.get("trace")
    if result is None or not result.ok or not result.trace:
        return None
    trace, unprofiled = result.trace, row.median_ms
    stretch = trace["step_ms"] / unprofiled if unprofiled else 0.0
    return TracedStep(row, trace, row.method, trace.get("gpu"), unprofiled or trace["step_ms"], stretch)


def traced_steps(rows: Sequence[Row]) -> list[TracedStep]:
    return [step for row in rows if (step := traced_step(row))]


def traced(rows: Sequence[Row]) -> list[list[TracedStep]]:
    """Return the traces that are compared with each other."""
    return [steps for group in group_by_size(rows) if (steps := traced_steps(group))]


def on_gpu(steps: Sequence[TracedStep]) -> bool:
    """Return whether all of them were traced on a GPU."""
    return all(step.gpu for step in steps)


def stretched_in_words(steps: Sequence[TracedStep]) -> str:
    """Return `? The profiler makes a step of flat 10.2× as long …`; nothing if every step stays about as it is."""
    found = [f"{step.method} {format_ratio(step.stretch)}" for step in steps if step.stretch > STRETCHED]
    if not found:
        return ""
    return (
        f"{MARK} The profiler makes a step much longer ({', '.join(found)} the unprofiled one): what the host does in "
        "it is mostly the profiler's, and is not compared. Larger sizes are stretched less."
    )


def phase_names(steps: Sequence[TracedStep]) -> list[str]:
    """Return the phases in the order of a step, as the method with most of them has them."""
    return in_longest_order([part["phase"] for part in step.trace["phases"]] for step in steps)


def phase_series(steps: Sequence[TracedStep]) -> Series:
    """Return the phases that take any time; GPU time if all were traced on one."""
    times = [step.phase_times(gpu=on_gpu(steps)) for step in steps]
    return _series((*phase_names(steps), IDLE), times)


def family_series(steps: Sequence[TracedStep]) -> Series:
    """Return kernel time by family, the families in order of the most time any method spends in them."""
    times = [{part["family"]: part["ms"] for part in step.trace.get("families", [])} for step in steps]
    names = {name for own in times for name in own}
    return _series(sorted(names, key=lambda name: -max(own.get(name, 0.0) for own in times)), times)


def _series(names: Sequence[str], times: Sequence[Mapping[str, float]]) -> Series:
    series = {name: [own.get(name) for own in times] for name in names}
    return {name: values for name, values in series.items() if any(values)}


def differences(steps: Sequence[TracedStep]) -> list[StepDifference]:
    """Return every traced method against standard; empty without a traced standard."""
    return [step.difference for step in steps if step.difference]

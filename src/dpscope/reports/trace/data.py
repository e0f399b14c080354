"""What traces say of the rows of a comparison, and of two of them: pure functions of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dpscope.reports.doubt import MARK, STRETCHED
from dpscope.reports.tables import Row, group_by_size, once_a_row
from dpscope.reports.words import in_longest_order
from dpscope.results.payloads.trace import GpuTime, TracePayload
from dpscope.units import format_ratio

GPU, CPU = "gpu", "cpu"
IDLE = "GPU idle"
OUTSIDE = "outside operators (Python, hooks, the profiler)"
SIDE_BY_SIDE = "less: work side by side on several streams"

# A GPU that works for less than this part of an unprofiled step waits for the host.
BUSY_ENOUGH = 0.8

Series = dict[str, list[float | None]]  # phase or family -> milliseconds, one for each method
OperatorInPhase = tuple[str, str]  # operator, phase


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A row with its trace."""

    row: Row
    trace: TracePayload

    @property
    def method(self) -> str:
        return self.row.method

    @property
    def gpu(self) -> GpuTime | None:
        return self.trace.get("gpu")

    @property
    def stretch(self) -> float:
        """How many times as long as the unprofiled step the traced one is; 0 where that is not known."""
        return self.trace["step_ms"] / self.row.median_ms if self.row.median_ms else 0.0

    @property
    def step_ms(self) -> float:
        """Without the profiler, where that is known."""
        return self.row.median_ms or self.trace["step_ms"]

    def phase_times(self, *, gpu: bool) -> dict[str, float]:
        """Host time; or GPU time and, since the profiler leaves kernels alone but not the host, what the unprofiled
        step takes beyond it."""
        times = {part["phase"]: part["gpu_ms"] if gpu else part["cpu_ms"] for part in self.trace["phases"]}
        return times | ({IDLE: max(self.step_ms - sum(times.values()), 0.0)} if gpu else {})

    @cached_property
    def difference(self) -> StepDifference | None:
        """Against ordinary training; None for itself, and where that was not traced."""
        standard = self.row.standard
        other = None if standard is None or standard is self.row else traced_step(standard)
        return None if other is None else _compare(self, other)

    @property
    def bound(self) -> str:
        """Does the GPU wait for the host? Kernels take as long under the profiler as without it; the host does not:
        so busy time over unprofiled time. Empty without a GPU."""
        if self.gpu is None or not self.step_ms:
            return ""
        share = min(self.gpu["busy_ms"] / self.step_ms, 1.0)
        step = "the unprofiled step" if self.row.median_ms else "the traced step, which the profiler makes longer"
        how = f"launch-bound: the GPU works in {share:.0%} of {step}"
        return f"{how}; the rest it waits for the host" if share < BUSY_ENOUGH else f"not {how}"


@once_a_row
def traced_step(row: Row) -> TracedStep | None:
    """None if the trace instrument did not look at the row, or failed."""
    result = row.measured.get("trace")
    return TracedStep(row, result.trace) if result is not None and result.ok and result.trace else None


def traced_steps(rows: Sequence[Row]) -> list[TracedStep]:
    return [step for row in rows if (step := traced_step(row))]


def traced(rows: Sequence[Row]) -> list[list[TracedStep]]:
    """Traces that are compared with each other."""
    return [steps for group in group_by_size(rows) if (steps := traced_steps(group))]


def on_gpu(steps: Sequence[TracedStep]) -> bool:
    """Were all of them traced on a GPU?"""
    return all(step.gpu for step in steps)


def stretched_in_words(steps: Sequence[TracedStep]) -> str:
    """`? The profiler makes a step of flat 10.2× as long …`; nothing where it leaves every step about as it is."""
    found = [f"{step.method} {format_ratio(step.stretch)}" for step in steps if step.stretch > STRETCHED]
    if not found:
        return ""
    return (
        f"{MARK} The profiler makes a step much longer ({', '.join(found)} the unprofiled one): what the host does in "
        "it is mostly the profiler's, and is not compared. Larger sizes are stretched less."
    )


def phase_names(steps: Sequence[TracedStep]) -> list[str]:
    """In the order of a step: as the method with most of them has them."""
    return in_longest_order([part["phase"] for part in step.trace["phases"]] for step in steps)


def phase_series(steps: Sequence[TracedStep]) -> Series:
    """Of the phases that take any time; GPU time where all were traced on one."""
    times = [step.phase_times(gpu=on_gpu(steps)) for step in steps]
    return _series((*phase_names(steps), IDLE), times)


def family_series(steps: Sequence[TracedStep]) -> Series:
    """Kernel time by family, the families in order of the most time any method spends in them."""
    times = [{part["family"]: part["ms"] for part in step.trace.get("families", [])} for step in steps]
    names = {name for own in times for name in own}
    return _series(sorted(names, key=lambda name: -max(own.get(name, 0.0) for own in times)), times)


def _series(names: Sequence[str], times: Sequence[Mapping[str, float]]) -> Series:
    series = {name: [own.get(name) for own in times] for name in names}
    return {name: values for name, values in series.items() if any(values)}


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
    """Why a method's traced step is longer than standard's. The changes sum to `total_ms`."""

    method: str
    basis: str
    total_ms: float
    changes: list[OperatorChange]  # most milliseconds first; the last lines are what no operator accounts for
    doubt: str  # what makes its total, and all time on the host, doubtful

    def biggest(self, most: int) -> tuple[list[OperatorChange], float, int]:
        """The changes that matter most, whichever way, the longest first; what all others sum to; how many they are."""
        kept = sorted(self.changes, key=lambda change: -abs(change.ms))[:most]
        rest = self.total_ms - sum(change.ms for change in kept)
        return sorted(kept, key=lambda change: -change.ms), rest, len(self.changes) - len(kept)


def differences(steps: Sequence[TracedStep]) -> list[StepDifference]:
    """Every traced method against standard; empty without a traced standard."""
    return [step.difference for step in steps if step.difference]


def _compare(method: TracedStep, standard: TracedStep) -> StepDifference:
    """Operator by operator, GPU time where both were traced on a GPU, else self time on the host."""
    steps = (standard, method)
    basis = GPU if on_gpu(steps) else CPU
    clock: Literal["gpu_ms", "self_cpu_ms"] = "gpu_ms" if basis == GPU else "self_cpu_ms"
    then, now = (
        {(each["operator"], each["phase"]): ms for each in step.trace["operators"] if (ms := each[clock])}
        for step in steps
    )
    rest_then, rest_now = (_rest(step.trace, basis) for step in steps)
    changes = [
        OperatorChange(*key, then.get(key, 0.0), now.get(key, 0.0), _kind(key, then, now))
        for key in dict.fromkeys([*now, *then])
    ]
    ordered = sorted((change for change in changes if change.ms), key=lambda change: -change.ms)
    rest = [OperatorChange(what, "", rest_then[what], rest_now[what], "grew") for what in rest_now]
    total = method.trace["step_ms"] - standard.trace["step_ms"]
    return StepDifference(method.method, basis, total, [*ordered, *rest], stretched_in_words(steps))


def _rest(trace: TracePayload, basis: str) -> dict[str, float]:
    """What a step's time is beside its operators'."""
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

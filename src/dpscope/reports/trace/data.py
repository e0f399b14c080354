"""Traces of the rows of a comparison, and of two of them: pure functions of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dpscope.reports.doubt import MARK, STRETCHED
from dpscope.reports.tables import Row, group_by_size, once_a_row
from dpscope.reports.words import in_longest_order
from dpscope.results.payloads.trace import GpuTime, TracePayload
from dpscope.results.trace_difference import IDLE, StepDifference, compare_traces
from dpscope.units import format_ratio

# A GPU that works for less than this part of an unprofiled step waits for the host.
BUSY_ENOUGH = 0.8

Series = dict[str, list[float | None]]  # phase or family -> milliseconds, one for each method


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
        """Traced step time over unprofiled step time; 0 if that is not known."""
        return self.trace["step_ms"] / self.row.median_ms if self.row.median_ms else 0.0

    @property
    def step_ms(self) -> float:
        """Step time without the profiler, if known."""
        return self.row.median_ms or self.trace["step_ms"]

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
    return TracedStep(row, result.trace) if result is not None and result.ok and result.trace else None


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

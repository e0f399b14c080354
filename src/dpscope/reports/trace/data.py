"""What traces say of the rows of a comparison, and of two of them: pure functions of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.doubt import MARK, is_stretched, stretch_of
from dpscope.reports.tables import STANDARD, Row, group_by_size
from dpscope.units import format_ratio

GPU, CPU = "gpu", "cpu"
GREW, NEW, GONE = "grew", "new", "gone"
IDLE = "GPU idle"

# A GPU that works for less than this part of an unprofiled step waits for the host.
BUSY_ENOUGH = 0.8


def trace_of(row: Row) -> Any:
    """What the trace instrument saw of a row; empty if it did not look, or failed."""
    result = row.measured.get("trace")
    return result.trace if result is not None and result.ok else {}


def traced(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows with a trace that are compared with each other."""
    groups = ([row for row in group if trace_of(row)] for group in group_by_size(rows))
    return [group for group in groups if group]


def stretch(row: Row) -> float | None:
    """How many times as long as the unprofiled step the traced one is; None where either is not known."""
    return stretch_of(trace_of(row).get("step_ms"), row.median_ms)


def stretched_in_words(rows: Sequence[Row]) -> str:
    """`? The profiler makes a step of flat 10.2× as long …`; nothing where it leaves every step about as it is."""
    found = [f"{row.method} {format_ratio(stretch(row))}" for row in rows if is_stretched(stretch(row))]
    if not found:
        return ""
    return (
        f"{MARK} The profiler makes a step much longer ({', '.join(found)} the unprofiled one): what the host does in "
        "it is mostly the profiler's, and is not compared. Larger sizes are stretched less."
    )


def phase_names(rows: Sequence[Row]) -> list[str]:
    """In the order of a step: as the method with most of them has them."""
    fullest = sorted((trace_of(row)["phases"] for row in rows), key=len, reverse=True)
    return list(dict.fromkeys(part["phase"] for parts in fullest for part in parts))


def on_gpu(rows: Sequence[Row]) -> bool:
    """Were all of them traced on a GPU?"""
    return all("gpu" in trace_of(row) for row in rows)


def phase_times(row: Row, *, gpu: bool) -> dict[str, float]:
    """Host time; or GPU time and, since the profiler leaves kernels alone but not the host, what the unprofiled step
    takes beyond it."""
    trace = trace_of(row)
    times: dict[str, float] = {part["phase"]: part["gpu_ms" if gpu else "cpu_ms"] for part in trace["phases"]}
    step = row.median_ms or trace["step_ms"]
    return times | ({IDLE: max(step - sum(times.values()), 0.0)} if gpu else {})


@dataclass(frozen=True)
class Change:
    """Milliseconds that an operator in a phase takes in one method's step and in standard's."""

    operator: str
    phase: str
    before_ms: float
    after_ms: float
    kind: str  # new: standard does not do it in any phase; gone: only standard does

    @property
    def ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass(frozen=True)
class Difference:
    """Why a method's traced step is longer than standard's. The changes sum to `total_ms`."""

    method: str
    basis: str
    total_ms: float
    changes: list[Change]  # most milliseconds first; the last lines are what no operator accounts for
    doubt: str = ""  # what makes its total, and all time on the host, doubtful

    def biggest(self, most: int) -> tuple[list[Change], float]:
        """The changes that matter most, whichever way, and what all others sum to."""
        kept = sorted(self.changes, key=lambda change: -abs(change.ms))[:most]
        return kept, self.total_ms - sum(change.ms for change in kept)

    @property
    def grown(self) -> list[Change]:
        return [change for change in self.changes if change.ms > 0]


def difference(method: Row, standard: Row) -> Difference:
    """Operator by operator, GPU time where both were traced on a GPU, else self time on the host."""
    after, before = trace_of(method), trace_of(standard)
    basis = GPU if GPU == after["basis"] == before["basis"] else CPU
    then, now = _self_times(before, basis), _self_times(after, basis)
    known = {operator for operator, _ in then}
    kept = {operator for operator, _ in now}
    changes = [
        Change(*key, then.get(key, 0.0), now.get(key, 0.0), _kind(key, then, now, known, kept))
        for key in dict.fromkeys([*now, *then])
    ]
    rest = [
        Change(what, "", _rest(before, basis)[what], _rest(after, basis)[what], GREW) for what in _rest(after, basis)
    ]
    ordered = sorted((change for change in changes if change.ms), key=lambda change: -change.ms)
    doubt = stretched_in_words([standard, method])
    return Difference(method.method, basis, after["step_ms"] - before["step_ms"], [*ordered, *rest], doubt)


def _self_times(trace: dict[str, Any], basis: str) -> dict[tuple[str, str], float]:
    column = "gpu_ms" if basis == GPU else "self_cpu_ms"
    return {(row["operator"], row["phase"]): row[column] for row in trace["operators"] if row[column]}


def _rest(trace: dict[str, Any], basis: str) -> dict[str, float]:
    """What a step's time is beside its operators'."""
    if basis == CPU:
        return {"outside operators (Python, hooks, the profiler)": trace["outside_operators_ms"]}
    gpu = trace["gpu"]
    rest = {IDLE: gpu["idle_ms"]}
    return rest | {"less: work side by side on several streams": -gpu["overlap_ms"]}


def _kind(key: tuple[str, str], then: Any, now: Any, known: set[str], kept: set[str]) -> str:
    if key not in then:
        return NEW if key[0] not in known else f"new in {key[1]}"
    if key not in now:
        return GONE if key[0] not in kept else f"gone from {key[1]}"
    return GREW if now[key] >= then[key] else "shrank"


def differences(rows: Sequence[Row]) -> list[Difference]:
    """Every traced method of one size against standard; empty without a traced standard."""
    standard = next((row for row in rows if row.method == STANDARD and trace_of(row)), None)
    if standard is None:
        return []
    return [difference(row, standard) for row in rows if row is not standard and trace_of(row)]


@dataclass(frozen=True)
class Boundness:
    """Does the GPU wait for the host? `share` of a step in which it works, and which step was taken."""

    launch_bound: bool
    share: float
    unprofiled: bool

    @property
    def sentence(self) -> str:
        step = "the unprofiled step" if self.unprofiled else "the traced step, which the profiler makes longer"
        how = f"the GPU works in {self.share:.0%} of {step}"
        if self.launch_bound:
            return f"launch-bound: {how}; the rest it waits for the host"
        return f"not launch-bound: {how}"


def boundness(row: Row) -> Boundness | None:
    """Kernels take as long under the profiler as without it; the host does not. So busy time over unprofiled time."""
    gpu = trace_of(row).get("gpu")
    if gpu is None:
        return None
    step = row.median_ms or trace_of(row)["step_ms"]
    share = min(gpu["busy_ms"] / step, 1.0)
    return Boundness(share < BUSY_ENOUGH, share, row.median_ms is not None)

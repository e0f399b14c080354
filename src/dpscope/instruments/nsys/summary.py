"""Figures from a timeline: what the GPU spent its time on, in which phase, and when it was idle.

A kernel belongs to the phase in which it was launched, from any thread of the process (autograd has its own), and to
the innermost if ranges nest. A gap is *waiting for the host* if the work that ended it was not yet launched when the
gap began. docs/nsys.md has the details.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from dpscope.instruments.families import short_kernel_name
from dpscope.instruments.intervals import PhaseTimeline
from dpscope.instruments.nsys.reading import KERNEL, MEMCPY, MEMSET, Activity, Call, CapturedTimeline, Range
from dpscope.results.payloads.trace import CapturedGpu, CapturedPhase, IdleGap, Named, NsysPayload, Total
from dpscope.vocabulary.phases import BETWEEN_PHASES, PHASES, STEP

KEPT_NAMES = 40  # kernels and calls listed by name; the rest is added up
KEPT_GAPS = 10
Launches = dict[tuple[int, int] | None, Call]  # by process and correlation id: what launched an activity


def summarise_timeline(timeline: CapturedTimeline) -> NsysPayload:
    """Return milliseconds, calls and bytes of an average step; of the whole capture if no range marks a step."""
    # On the threads that run steps; a library's own `forward` elsewhere is ignored.
    threads = {r.thread for r in timeline.ranges if r.name == STEP} or {r.thread for r in timeline.ranges}
    ranges = [r for r in timeline.ranges if r.name in (STEP, *PHASES) and r.thread in threads]
    steps = sum(r.name == STEP for r in ranges)
    average = StepAverage(steps or 1)
    launches: Launches = {}
    for call in timeline.calls:
        if call.id is not None:
            launches.setdefault(call.id, call)  # of nested calls the outer one
    marked = PhaseTimeline((r.name, r.start, r.end + 1) for r in ranges)  # the last nanosecond is within
    launched = [launches[a.call].start if a.call in launches else -1 for a in timeline.activities]
    phases = [BETWEEN_PHASES if (name := marked.at(moment)) == STEP else name for moment in launched]
    gaps = _gaps(timeline.activities, launches, phases)
    of_kind = {kind: [a for a in timeline.activities if a.kind == kind] for kind in (KERNEL, MEMCPY, MEMSET)}
    waits = [a.start - launches[a.call].start for a in of_kind[KERNEL] if a.call in launches]
    return {
        "steps": steps or None,
        "phases": _by_phase(timeline.activities, phases, ranges, gaps, average) if ranges else [],
        "gpu": _busy(timeline.activities, gaps, average, waits),
        "gaps": sorted(gaps, key=lambda gap: -gap["ms"])[:KEPT_GAPS],
        "kernels": [{**row, "short": short_kernel_name(row["name"])} for row in average.by_name(of_kind[KERNEL])],
        "kernel_total": average.total(of_kind[KERNEL]),
        "copies": average.by_name(of_kind[MEMCPY]),
        "memsets": average.total(of_kind[MEMSET]),
        "api": average.by_name(timeline.calls),
    }


class StepAverage:
    """Figures of an average step from those of all steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def ms(self, nanoseconds: float) -> float:
        return nanoseconds / self.steps / 1e6

    def total(self, events: Sequence[Activity | Call]) -> Total:
        duration = sum(event.end - event.start for event in events)
        size = sum(event.bytes for event in events if isinstance(event, Activity))
        total: Total = {"calls": len(events) / self.steps, "ms": self.ms(duration)}
        return {**total, "bytes": size / self.steps} if size else total

    def by_name(self, events: Sequence[Activity] | Sequence[Call]) -> list[Named]:
        """Return the time of each name, the longest first; names beyond KEPT_NAMES share one row."""
        groups: dict[str, list[Activity | Call]] = defaultdict(list)
        for event in events:
            groups[event.name].append(event)
        rows = {name: self.total(group) for name, group in groups.items()}
        names = sorted(rows, key=lambda name: -rows[name]["ms"])
        listed: list[Named] = [{"name": name, **rows[name]} for name in names[:KEPT_NAMES]]
        if rest := names[KEPT_NAMES:]:
            listed.append({"name": f"{len(rest)} others", **self.total([e for name in rest for e in groups[name]])})
        return listed


def _gaps(activities: Sequence[Activity], launches: Launches, phases: Sequence[str]) -> list[IdleGap]:
    """Return the stretches in which the GPU was idle, between the first and the last activity of the capture."""
    gaps: list[IdleGap] = []
    busy_until = activities[0].end
    for activity, phase in zip(activities, phases, strict=True):
        if (hole := activity.start - busy_until) > 0:
            call = launches.get(activity.call)
            late = call is not None and call.end > busy_until
            gaps.append(
                {"ms": hole / 1e6, "waiting_for_host": late, "phase": phase, "before": short_kernel_name(activity.name)}
            )
        busy_until = max(busy_until, activity.end)
    return gaps


def _busy(
    activities: Sequence[Activity], gaps: Sequence[IdleGap], average: StepAverage, waits: Sequence[int]
) -> CapturedGpu:
    span = average.ms(max(activity.end for activity in activities) - activities[0].start)
    idle = sum(gap["ms"] for gap in gaps) / average.steps
    waiting = sum(gap["ms"] for gap in gaps if gap["waiting_for_host"]) / average.steps
    total = average.total(activities)["ms"]
    return {
        "total_ms": total,
        "span_ms": span,
        "busy_ms": span - idle,
        "idle_ms": idle,
        "idle_waiting_for_host_ms": waiting,
        "gaps": len(gaps) / average.steps,
        "launch_to_start_us": median(waits) / 1e3 if waits else None,
    }


def _by_phase(
    activities: Sequence[Activity],
    phases: Sequence[str],
    ranges: Sequence[Range],
    gaps: Iterable[IdleGap],
    average: StepAverage,
) -> list[CapturedPhase]:
    """Return GPU time and kernels of each phase, the host's time in it, and the GPU's idle time before its work."""
    launched: dict[str, list[Activity]] = defaultdict(list)
    for activity, phase in zip(activities, phases, strict=True):
        launched[phase].append(activity)
    host: dict[str, float] = defaultdict(float)
    marked = PhaseTimeline((r.name, r.start, r.end) for r in ranges)
    for name, length in marked.within(ranges[0].start, max(r.end for r in ranges)):
        host[name] += length
    host[BETWEEN_PHASES] = host.pop(STEP, 0)
    idle: dict[str, float] = defaultdict(float)
    for gap in gaps:
        idle[gap["phase"]] += gap["ms"] / average.steps
    return [
        {
            "phase": name,
            "gpu_ms": average.total(launched[name])["ms"],
            "cpu_ms": average.ms(host.get(name, 0)),
            "idle_ms": idle[name],
            "kernels": sum(activity.kind == KERNEL for activity in launched[name]) / average.steps,
        }
        for name in (*PHASES, BETWEEN_PHASES)
        if launched[name] or host.get(name)
    ]

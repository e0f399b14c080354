"""Time of a recorded step in collectives, moving data or waiting: NCCL's kernels, or gloo's threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpscope.instruments.families import kernel_family
from dpscope.instruments.sums import Sums
from dpscope.instruments.trace.attribution import StepView, clip_to, step_views, union
from dpscope.instruments.trace.events import Event, Trace
from dpscope.results.payloads import trace as payload
from dpscope.vocabulary.families import COLLECTIVE

GLOO = "gloo:"  # before the name of a collective, in the range around it on one of gloo's threads


def collective_time(traces: Sequence[Trace]) -> payload.CollectiveTime:
    """Return the collectives of an average step; overlaps count once in `under_way_ms`, each time in `kinds`."""
    views = [view for trace in traces for view in step_views(trace)]
    sums = Sums("count", "ms", steps=len(views))
    under_way = exposed = 0.0
    for view in views:
        found = list(_collectives(view))
        for event in found:
            sums.add(_kind(event), 1, event.duration / 1e3)
        covered = union(clip_to(view.step, found))
        under_way += _length(covered)
        others = [work for work in view.device_work if kernel_family(work.name) != COLLECTIVE]
        exposed += _length(union([*covered, *clip_to(view.step, others)])) - _length(union(clip_to(view.step, others)))
    time: payload.CollectiveTime = {
        "kinds": sums.rows("ms", "collective"),
        "under_way_ms": under_way / 1e3 / len(views),
        "step_ms": sum(view.step.duration for view in views) / 1e3 / len(views),
    }
    if any(trace.on_gpu for trace in traces):
        time["exposed_ms"] = exposed / 1e3 / len(views)
    return time


def _collectives(view: StepView) -> Iterator[Event]:
    """Yield what runs within the step: kernels, or ranges of gloo's threads."""
    yield from (work for work in view.device_work if kernel_family(work.name) == COLLECTIVE)
    yield from (
        event
        for event in view.trace.annotations
        if event.name.startswith(GLOO) and event.end > view.step.start and event.start < view.step.end
    )


# What is in the name of a kernel of NCCL, or of a range of gloo, by the name that people know.
_KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "sendrecv": "send and receive",
}


def _kind(event: Event) -> str:
    plain = event.name.lower().replace("_", "")
    return next((kind for word, kind in _KINDS.items() if word in plain), event.name.removeprefix(GLOO))


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)

"""Causes of slow steps other than arithmetic: waits, copies between host and device, casts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from dpscope.instruments.sums import Sums
from dpscope.instruments.trace.attribution import StepView
from dpscope.instruments.trace.events import OPERATOR, EnclosingEvents, Event, Trace, nest
from dpscope.results.payloads.trace import Cast, Copy, Synchronisation

# On a CPU nothing waits, but these operators hand a tensor's value to Python: on a GPU each would be a wait.
READS_A_VALUE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select")

_KIND = re.compile(r"\b([HDP]to[HDPA])\b")


def synchronisations(views: Sequence[StepView], *, on_gpu: bool) -> list[Synchronisation]:
    """Return where the host waited for the GPU (or would have, in a CPU trace), longest first, for an average step."""
    sums = Sums("count", "ms", steps=len(views))
    for view in views:
        places = _SourceLines(view.trace)
        waits = _waits(view) if on_gpu else [event for event in view.operators if _reads_a_value(event)]
        for wait in waits:
            key = (wait.name, _outermost_operator(view.trace, wait), view.phases.at(wait.start), places.of(wait))
            sums.add(key, 1, wait.duration / 1e3)
    return sums.rows("ms", "call", "operator", "phase", "where")


def _reads_a_value(event: Event) -> bool:
    return event.name in READS_A_VALUE and not any(around.name in READS_A_VALUE for around in event.ancestors())


def _waits(view: StepView) -> list[Event]:
    """Return the calls that return only when the GPU has caught up."""
    to_pageable = {
        work.args.get("correlation") for work in view.device_work if "DtoH" in work.name and "Pageable" in work.name
    }
    return [
        call
        for call in view.calls
        if "Synchronize" in call.name or call.name == "cudaMemcpy" or call.args.get("correlation", -1) in to_pageable
    ]


def _outermost_operator(trace: Trace, event: Event) -> str:
    """Return the operator a person would recognise: the outermost around it, autograd's own frames left out."""
    inner = trace.operator_of(event)
    if inner is None:
        return "(no operator)"
    chain = [e for e in (inner, *inner.ancestors()) if e.category == OPERATOR and not e.name.startswith("autograd::")]
    named = [e for e in chain if "::" in e.name] or chain
    return named[-1].name if named else inner.name


class _SourceLines:
    """Lines of Python, where stacks were recorded: the innermost frame that is not torch's own."""

    def __init__(self, trace: Trace) -> None:
        nest(trace.frames)
        self._around = EnclosingEvents(trace.frames)

    def of(self, event: Event) -> str:
        frame = self._around.find(event.thread, event.start)
        own = frame.nearest(_is_user_code) if frame is not None else None
        return "" if own is None else own.name


def _is_user_code(frame: Event) -> bool:
    name = frame.name
    return ".py(" in name and not name.startswith(("torch/", "<")) and "/torch/" not in name


def copies(views: Sequence[StepView]) -> list[Copy]:
    """Return the copies of an average step by direction (H host, D device), with their bytes and who asked for them."""
    sums = Sums("count", "bytes", "ms", steps=len(views))
    for view in views:
        for work in view.device_work:
            if work.category == "gpu_memcpy":
                match = _KIND.search(work.name)
                key = (
                    match.group(1) if match else work.name,
                    _outermost_operator(view.trace, work),
                    view.phase_of(work),
                )
                sums.add(key, 1, work.args.get("bytes", 0), work.duration / 1e3)
    return sums.rows("bytes", "kind", "operator", "phase")


def casts(views: Sequence[StepView]) -> list[Cast]:
    """Return the copies from one number format to another, by phase. The formats are known where shapes were recorded.

    A kernel that converts as a part of other work is not counted as a cast.
    """
    sums = Sums("count", "cpu_ms", "gpu_ms", steps=len(views))
    for view in views:
        inside: dict[int, float] = defaultdict(float)  # what each operator launched, in microseconds
        for work in view.device_work:
            inside[id(view.trace.operator_of(work))] += work.duration
        for event in view.operators:
            formats = _formats(event)
            if formats is not None:
                key = (formats, view.phases.at(event.start))
                sums.add(key, 1, event.duration / 1e3, inside[id(event)] / 1e3)
    return sorted(sums.rows("count", "formats", "phase"), key=lambda row: -(row["gpu_ms"] or row["cpu_ms"]))


def _formats(event: Event) -> str | None:
    """Return `float to bfloat16` for a cast, None for any other operator."""
    if event.name != "aten::copy_":
        return None
    types = event.args.get("Input type")
    if not types:  # without shapes: copies within a conversion are taken for casts
        converting = event.parent is not None and event.parent.name == "aten::_to_copy"
        return "not recorded (--shapes)" if converting else None
    target, source = (str(name).removeprefix("c10::").lower() for name in types[:2])
    return None if target == source else f"{source} to {target}"

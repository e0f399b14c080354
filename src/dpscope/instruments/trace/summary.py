"""A recorded step in figures: milliseconds by phase, operator, kernel and module; waits, copies and casts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from dpscope.instruments.families import Sums, kernel_family, short_kernel_name, shorten_rows
from dpscope.instruments.trace.attribution import ModuleTable, StepView, collective_time, covered_by, step_views
from dpscope.instruments.trace.capture import MODULE, WAIT
from dpscope.instruments.trace.events import OPERATOR, EnclosingEvents, Event, Trace, nest
from dpscope.results.payloads import trace as payload
from dpscope.results.payloads.trace import Cast, Copy, Synchronisation
from dpscope.vocabulary.phases import BETWEEN_PHASES, PHASES

# On a CPU nothing waits, but these operators hand a tensor's value to Python: on a GPU each would be a wait.
READS_A_VALUE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select")

_KIND = re.compile(r"\b([HDP]to[HDPA])\b")


def synchronisations(views: Sequence[StepView], *, on_gpu: bool) -> list[Synchronisation]:
    """Return where the host waited for the GPU (or would have, in a CPU trace), longest first, for an average step."""
    sums = Sums("count", "ms", steps=len(views))
    for view in views:
        nest(view.trace.frames)
        frames = EnclosingEvents(view.trace.frames)
        reads = [event for event in view.operators if event.name in READS_A_VALUE]
        outermost = [e for e in reads if not any(around.name in READS_A_VALUE for around in e.ancestors())]
        waits = _waits(view) if on_gpu else outermost
        for wait in waits:
            frame = frames.find(wait.thread, wait.start)  # of Python, where stacks were recorded
            own = frame.nearest(_is_user_code) if frame is not None else None
            where = "" if own is None else own.name
            key = (wait.name, _outermost_operator(view.trace, wait), view.phases.at(wait.start), where)
            sums.add(key, 1, wait.duration / 1e3)
    return sums.rows("ms", "call", "operator", "phase", "where")


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
                kind = match.group(1) if match else work.name
                key = (kind, _outermost_operator(view.trace, work), view.phase_of(work))
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


MEMORY_POINTS = 500  # of memory over time
LISTED_NAMES = 40  # kernels and operators; the rest is summed up in one line
LISTED_MODULES = 1000  # likewise; a report chooses the level of modules that it shows

KEYWORDS = ("clip", "norm", "einsum", "elementwise", "reduce")  # what readers of DP-SGD traces look for by name


def summarise(traces: Sequence[Trace]) -> payload.TracePayload:
    """Return the recorded steps of one or several traces, averaged.

    `phases` sum to `step_ms` (host); on a GPU `operators`' `gpu_ms` plus `gpu.idle_ms` less `gpu.overlap_ms` sum to
    it too; without one, `operators`' `self_cpu_ms` on the step's thread plus `outside_operators_ms`.
    """
    views = [view for trace in traces for view in step_views(trace)]
    on_gpu = any(trace.on_gpu for trace in traces)
    count = len(views)
    operators = _operators(views)
    step_ms = _ms(sum(view.step.duration for view in views)) / count
    own = sum(event.self_time for view in views for event in view.main_operators)
    summary: payload.TracePayload = {
        "basis": "gpu" if on_gpu else "cpu",
        "steps": count,
        "step_ms": step_ms,
        "each_step_ms": [_ms(view.step.duration) for view in views],
        "phases": _phases(views),
        "operators": operators,
        "outside_operators_ms": step_ms - _ms(own) / count,
        "named": _by_keyword(views),
        "synchronisations": synchronisations(views, on_gpu=on_gpu),
        "casts": casts(views),
    }
    if on_gpu:
        kernels, families = _kernels(views)
        summary |= {"gpu": _gpu(views), "kernels": kernels, "families": families, "copies": copies(views)}
    if (found := collective_time(traces))["kinds"]:
        summary["collectives"] = found
    if any(event.name.startswith(MODULE) for trace in traces for event in trace.annotations):
        summary["modules"] = _modules(views)
    if any(trace.memory for trace in traces):
        summary["memory"] = _memory(traces, count)
    return summary


def _ms(microseconds: float) -> float:
    return microseconds / 1e3


def _phases(views: Sequence[StepView]) -> list[payload.Phase]:
    """Return host and GPU time of each phase. Time between phases is a row of its own, so that columns add up."""
    sums = Sums("cpu_ms", "gpu_ms", steps=len(views))
    for view in views:
        for name, length in view.phases.within(view.step.start, view.step.end):
            sums.add(name, _ms(length), 0.0)
        for work in view.device_work:
            sums.add(view.phase_of(work), 0.0, _ms(work.duration))
    order = (*PHASES, BETWEEN_PHASES, WAIT)
    return sorted(sums.rows("cpu_ms", "phase"), key=lambda row: order.index(row["phase"]))


def _operators(views: Sequence[StepView]) -> list[payload.Operator]:
    """Return the self time of every operator in every phase. A kernel without an operator has its own name."""
    sums = Sums("count", "self_cpu_ms", "gpu_ms", steps=len(views))
    for view in views:
        for event in view.operators if view.trace.on_gpu else view.main_operators:
            sums.add((event.name, view.phases.at(event.start)), 1, _ms(event.self_time), 0.0)
        for work in view.device_work:
            operator = view.trace.operator_of(work)
            name = f"kernel {short_kernel_name(work.name)}" if operator is None else operator.name
            phase = view.phase_of(work) if operator is None else view.phases.at(operator.start)
            sums.add((name, phase), float(operator is None), 0.0, _ms(work.duration))
    return sums.rows("gpu_ms" if views[0].trace.on_gpu else "self_cpu_ms", "operator", "phase")


def _gpu(views: Sequence[StepView]) -> payload.GpuTime:
    """Return how long the GPU was busy and idle within the steps, and why it was idle."""
    busy = host = idle_host = idle_queued = idle_end = total = 0.0
    for view in views:
        total += sum(work.duration for work in view.device_work)
        covered = covered_by(view.trace.device_work, view.step)
        busy += sum(end - start for start, end in covered)
        asked = {}  # the start of each piece of work -> when the host had finished launching it
        for work in view.trace.device_work:
            launch = view.trace.launch_of(work)
            asked[max(work.start, view.step.start)] = work.start if launch is None else launch.end
        in_step = [time for time in asked.values() if time <= view.step.end]
        host += max(in_step, default=view.step.start) - view.step.start
        moment = view.step.start
        for start, end in covered:
            # If the next work had not been asked for when the GPU ran dry, the GPU waited for the host.
            if asked.get(start, moment) >= moment:
                idle_host += start - moment
            else:
                idle_queued += start - moment
            moment = end
        idle_end += view.step.end - moment
    count = len(views)
    launched = [work for view in views for work in view.device_work if work.category == "kernel"]
    return {
        "busy_ms": _ms(busy) / count,
        "host_busy_ms": _ms(host) / count,
        "idle_ms": _ms(idle_host + idle_queued + idle_end) / count,
        "idle_waiting_for_host_ms": _ms(idle_host) / count,
        "idle_between_queued_ms": _ms(idle_queued) / count,
        "idle_at_end_ms": _ms(idle_end) / count,
        "overlap_ms": _ms(total - busy) / count,
        "kernels": len(launched) / count,
        "mean_kernel_us": sum(work.duration for work in launched) / max(len(launched), 1),
    }


def _kernels(views: Sequence[StepView]) -> tuple[list[payload.Kernel], list[payload.Family]]:
    """Return the time of each kernel, and of each family, copies and fills included."""
    sums, families = (Sums("count", "ms", steps=len(views)) for _ in range(2))
    for view in views:
        for work in view.device_work:
            family, ms = kernel_family(work.name, view.phase_of(work)), _ms(work.duration)
            families.add(family, 1, ms)
            if work.category == "kernel":
                sums.add((short_kernel_name(work.name), family), 1, ms)
    keys = ("kernel", "family")
    return shorten_rows(sums.rows("ms", *keys), keys, LISTED_NAMES), families.rows("ms", "family")


def _by_keyword(views: Sequence[StepView]) -> list[payload.NamedWork]:
    """Return kernels and operators with one of `KEYWORDS` in their names. An operator's time includes its callees."""
    sums = Sums("kernels", "kernel_ms", "operators", "operator_cpu_ms", "operator_gpu_ms", steps=len(views))
    for view in views:
        for word in KEYWORDS:
            sums.add(word, 0, 0, 0, 0, 0)
            named = [event for event in view.operators if word in event.name.lower()]
            calls = [e for e in named if not any(word in around.name.lower() for around in e.ancestors())]
            outermost = {id(event) for event in calls}
            sums.add(word, 0, 0, len(calls), _ms(sum(event.duration for event in calls)), 0)
            for work in view.device_work:
                if word in work.name.lower():
                    sums.add(word, 1, _ms(work.duration), 0, 0, 0)
                operator = view.trace.operator_of(work)
                if operator is not None and operator.nearest(lambda e: id(e) in outermost) is not None:  # noqa: B023
                    sums.add(word, 0, 0, 0, 0, _ms(work.duration))
    return sums.rows("operator_cpu_ms", "word")


def _modules(views: Sequence[StepView]) -> list[payload.ModuleTime]:
    """Time of the operators that worked for a module, forward and backward, without its submodules."""
    by = "gpu_ms" if views[0].trace.on_gpu else "cpu_ms"
    sums, in_phases = (Sums("cpu_ms", "gpu_ms", steps=len(views)) for _ in range(2))
    tables: dict[int, ModuleTable] = {}
    for view in views:
        table = tables.setdefault(id(view.trace), ModuleTable(view.trace))
        parts = [(table.of(event), view.phases.at(event.start), _ms(event.self_time), 0.0) for event in view.operators]
        parts += [
            (table.of(view.trace.operator_of(work)), view.phase_of(work), 0.0, _ms(work.duration))
            for work in view.device_work
        ]
        for module, phase, *times in parts:
            sums.add(module, *times)
            in_phases.add((module, phase), *times)
    phases: dict[str, dict[str, float]] = {}
    for row in in_phases.rows(by, "module", "phase"):
        phases.setdefault(row["module"], {})[row["phase"]] = row[by]
    rows = [{**row, "phases": phases[row["module"]]} for row in sums.rows(by, "module")]
    return shorten_rows(rows, ("module",), LISTED_MODULES)


def _memory(traces: Sequence[Trace], steps: int) -> payload.TracedMemory:
    """Return the bytes that operators allocated, and allocated memory over time."""
    keys = ("operator", "device")
    sums = Sums("allocations", "allocated_bytes", steps=steps)
    devices: dict[str, None] = {}
    for trace in traces:
        for event in trace.memory:
            key = (event["operator"] or "(no operator)", event["device"])
            sums.add(key, event["bytes"] > 0, max(event["bytes"], 0))
            devices[event["device"]] = None
    return {
        "operators": shorten_rows(sums.rows("allocated_bytes", *keys), keys, LISTED_NAMES),
        "over_time": {device: _over_time(traces[0], device) for device in devices},
    }


def _over_time(trace: Trace, device: str) -> list[tuple[float, int]]:
    """Return (milliseconds, bytes allocated) of one recording: the highest moment of each of `MEMORY_POINTS` stretches.

    It is the allocator's own total on a GPU. torch's CPU allocator keeps no total; there it counts from the start of
    the recording.
    """
    events = [event for event in trace.memory if event["device"] == device]
    levels = list(accumulate(event["bytes"] for event in events))
    if any(event["total_bytes"] for event in events):
        levels = [event["total_bytes"] for event in events]
    points = [(event["time_us"] / 1000, level) for event, level in zip(events, levels, strict=True)]
    width = ceil(len(points) / MEMORY_POINTS)
    return [max(points[first : first + width], key=lambda point: point[1]) for first in range(0, len(points), width)]

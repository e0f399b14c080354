"""The trace of a profiler in memory, without exporting it: a profiler can be exported only once.

Of work on the GPU it knows what launched it and how long it took, but not when it ran.
"""

from __future__ import annotations

import re
from typing import Any

from torch.profiler import profile

from dpscope.errors import UserError
from dpscope.instruments.trace.events import ANNOTATION, MEMORY_EVENT, OPERATOR, Event, Trace, nest

_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx
_KINDS = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}


def trace_from_profiler(profiler: profile) -> Trace:
    """What a profiler recorded, or `UserError` if that is nothing."""
    try:
        recorded = list(profiler.events() or [])  # type: ignore[no-untyped-call]
    except (AssertionError, AttributeError):
        recorded = []
    on_host = [each for each in recorded if each.device_type.name == "CPU" and not each.is_async]
    events = {id(each): _event(each) for each in on_host if each.name != MEMORY_EVENT and not _CALL.match(each.name)}
    if not events:
        raise UserError("the profiler has recorded nothing: run something in its `with` block, and leave the block")
    nest(events.values())
    ordered = sorted(events.values(), key=lambda event: (event.start, -event.duration))
    operators = [event for event in ordered if event.category == OPERATOR]
    return Trace(
        operators=operators,
        annotations=[event for event in ordered if event.category == ANNOTATION],
        calls=[],
        device_work=[work for each in on_host if id(each) in events for work in _device_work(each)],
        frames=[],
        memory=_memory(on_host),
        launches={},
        by_id={event.args["External id"]: event for event in operators},
    )


def _event(each: Any) -> Event:
    kind = ANNOTATION if getattr(each, "is_user_annotation", False) else OPERATOR
    args = {"External id": each.id, "Sequence number": each.sequence_nr}
    if each.input_shapes:
        args["Input Dims"] = each.input_shapes
    return Event(each.name, kind, each.time_range.start, each.time_range.elapsed_us(), ("", each.thread), args)


def _device_work(each: Any) -> list[Event]:
    """Kernels, copies and fills that an operator launched, placed where it began."""
    return [
        Event(
            kernel.name,
            _KINDS.get(kernel.name.partition(" ")[0], "kernel"),
            each.time_range.start,
            kernel.duration,
            ("device", kernel.device),
            {"External id": each.id},
        )
        for kernel in each.kernels
    ]


def _memory(on_host: list[Any]) -> list[dict[str, Any]]:
    """What each operator itself asked for and freed, as one change at its end; totals since the recording began."""
    changes: list[dict[str, Any]] = []
    totals = {"cpu": 0, "gpu": 0}
    for each in sorted(on_host, key=lambda event: event.time_range.end):
        for device, size in (("cpu", each.self_cpu_memory_usage), ("gpu", each.self_device_memory_usage)):
            if size:
                totals[device] += size
                changes.append(
                    {
                        "time_us": each.time_range.end,
                        "bytes": size,
                        "total_bytes": totals[device],
                        "device": device,
                        "operator": None if each.name == MEMORY_EVENT else each.name,
                        "order": len(changes),
                    }
                )
    return changes

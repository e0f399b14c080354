"""A Chrome trace as torch.profiler exports it: validated, nested, each kernel joined to its launch."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpscope.errors import UserError

OPERATOR, ANNOTATION, PYTHON = "cpu_op", "user_annotation", "python_function"
CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime")  # what the host asks of the device
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MEMORY_EVENT = "[memory]"
PROFILER_STEP = "ProfilerStep#"
INDUCTOR_GRAPH = re.compile(r"^## Call CompiledFxGraph \w+ ##$")  # whose key differs from run to run


@dataclass(slots=True, eq=False)
class Event:
    """A stretch of time on one thread or stream. Microseconds since the beginning of the trace."""

    name: str
    category: str
    start: float
    duration: float
    thread: tuple[Any, Any]  # (process, thread)
    args: dict[str, Any]
    parent: Event | None = None  # the innermost operator or annotation around it
    children: list[Event] = field(default_factory=list)  # operators and annotations directly within it

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def self_time(self) -> float:
        """Time of the event without everything directly within it; never below zero."""
        inner = sum(min(child.end, self.end) - child.start for child in self.children)
        return max(self.duration - inner, 0.0)

    def ancestors(self) -> Iterator[Event]:
        """Yield the events around it, from the innermost outwards."""
        event = self.parent
        while event is not None:
            yield event
            event = event.parent

    def nearest(self, wanted: Callable[[Event], bool]) -> Event | None:
        """Return the innermost wanted event among itself and those around it."""
        return self if wanted(self) else next(filter(wanted, self.ancestors()), None)


@dataclass(frozen=True)
class Trace:
    """Contents of one recording. Every list is in order of time."""

    operators: list[Event]
    annotations: list[Event]
    calls: list[Event]  # of the CUDA runtime and driver
    device_work: list[Event]  # kernels, copies and fills on the GPU
    frames: list[Event]  # Python functions, where stacks were recorded
    memory: list[dict[str, Any]]  # allocations (+) and frees (-): time, bytes, total, device, operator
    launches: dict[int, Event] = field(repr=False)  # correlation -> the call that launched it
    by_id: dict[int, Event] = field(repr=False)  # external id -> operator

    @property
    def on_gpu(self) -> bool:
        return bool(self.device_work)

    @property
    def steps(self) -> list[Event]:
        """Recorded steps; the whole recording if no step was marked."""
        marked = [event for event in self.annotations if event.name.startswith(PROFILER_STEP)]
        if marked:
            return marked
        events = [*self.operators, *self.annotations]
        start, end = min(event.start for event in events), max(event.end for event in events)
        return [Event("the recording", ANNOTATION, start, end - start, events[0].thread, {})]

    def launch_of(self, work: Event) -> Event | None:
        """Return the call on the host that asked for this kernel, copy or fill."""
        return self.launches.get(work.args.get("correlation", -1))

    def operator_of(self, event: Event) -> Event | None:
        """Return the innermost operator that made this call or launched this work."""
        call = self.launch_of(event) if event.category in DEVICE_WORK else event
        around = call.nearest(lambda e: e.category == OPERATOR) if call is not None else None
        return around or self.by_id.get(event.args.get("External id", -1))


def read_trace(path: Path | str) -> Trace:
    """Read the trace in a `.json` or `.json.gz` file. Raise `UserError` if the file is no trace."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text.decode("utf-8", errors="replace"), strict=False)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise UserError(f"{path} is damaged ({error}): record it again") from None
        raise UserError(f"cannot read the trace {path}: {error.strerror}") from None
    except (EOFError, zlib.error, ValueError, RecursionError):
        raise UserError(f"{path} is not a complete trace (cut short, or not JSON): record it again") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UserError(f"{path} is not a Chrome trace: it has no list of traceEvents")
    try:
        trace = parse_events(events)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a trace of torch.profiler ({type(error).__name__}: {error})") from None
    if not trace.operators and not trace.annotations:
        raise UserError(f"{path} holds no operators: nothing ran while it was recorded")
    return trace


def parse_events(raw: Iterable[dict[str, Any]]) -> Trace:
    """Return the events of a Chrome trace, nested."""
    raw = list(raw)
    found: dict[str, list[Event]] = defaultdict(list)
    complete = [each for each in raw if each.get("ph") == "X" and each.get("cat") != "Trace"]
    origin = min((each["ts"] for each in complete), default=0.0)
    for each in complete:
        thread = (each.get("pid"), each.get("tid"))
        duration = float(each.get("dur", 0.0))
        name = INDUCTOR_GRAPH.sub("Inductor graph", each["name"])
        event = Event(name, each["cat"], each["ts"] - origin, duration, thread, each.get("args", {}))
        found[event.category].append(event)
    for events in found.values():
        events.sort(key=lambda event: (event.start, -event.duration))
    calls, work = (
        sorted((event for kind in kinds for event in found[kind]), key=lambda event: event.start)
        for kinds in (CALLS, DEVICE_WORK)
    )
    nest([*found[OPERATOR], *found[ANNOTATION]], calls)
    return Trace(
        operators=found[OPERATOR],
        annotations=found[ANNOTATION],
        calls=calls,
        device_work=work,
        frames=found[PYTHON],
        memory=_memory(raw, origin, found[OPERATOR]),
        launches={call.args["correlation"]: call for call in calls if "correlation" in call.args},
        by_id={event.args["External id"]: event for event in found[OPERATOR] if "External id" in event.args},
    )


def nest(events: Iterable[Event], leaves: Iterable[Event] = ()) -> None:
    """Give every event its parent. `leaves` get one too, but are not counted among its children."""
    stacks: dict[Any, list[Event]] = defaultdict(list)
    inner = {id(leaf) for leaf in leaves}
    for event in sorted([*events, *leaves], key=lambda event: (event.start, -event.duration)):
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        event.parent = stack[-1] if stack else None
        if id(event) in inner:
            continue
        if event.parent is not None:
            event.parent.children.append(event)
        stack.append(event)


HALF_A_NANOSECOND = 5e-4  # in microseconds: the profiler's clock counts whole ones, and sums of floats do not


class EnclosingEvents:
    """Index of nested events, to find the innermost one at a moment of a thread."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events: dict[Any, list[Event]] = defaultdict(list)
        for event in events:
            self._events[event.thread].append(event)
        self._starts = {thread: [event.start for event in events] for thread, events in self._events.items()}

    def find(self, thread: tuple[Any, Any], moment: float) -> Event | None:
        place = bisect_right(self._starts.get(thread, []), moment) - 1
        if place < 0:
            return None
        event = self._events[thread][place]
        return event.nearest(lambda e: e.end >= moment - HALF_A_NANOSECOND)


def _memory(raw: Iterable[dict[str, Any]], origin: float, operators: list[Event]) -> list[dict[str, Any]]:
    around = EnclosingEvents(operators)
    events = []
    for each in raw:
        if each.get("name") != MEMORY_EVENT:
            continue
        args, moment = each["args"], each["ts"] - origin
        holder = around.find((each.get("pid"), each.get("tid")), moment)
        operator = holder.nearest(lambda e: e.category == OPERATOR) if holder is not None else None
        change = {"bytes": args["Bytes"], "total_bytes": args.get("Total Allocated", 0)}
        change |= {"device": "gpu" if args.get("Device Type", 0) else "cpu", "order": args.get("Ev Idx", 0)}
        events.append({"time_us": moment, **change, "operator": None if operator is None else operator.name})
    return sorted(events, key=lambda event: (event["time_us"], event["order"]))

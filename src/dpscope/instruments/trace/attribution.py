"""Attribution of host and GPU time to phases, operators, modules and collectives; bytes of collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.instruments.families import Sums, kernel_family
from dpscope.instruments.gradient_sums import as_without_modes
from dpscope.instruments.intervals import PhaseTimeline, union
from dpscope.instruments.timing import Step
from dpscope.instruments.trace.capture import MODULE, WAIT
from dpscope.instruments.trace.events import ANNOTATION, OPERATOR, Event, Trace
from dpscope.results.payloads import trace as payload
from dpscope.results.payloads.memory import Collective
from dpscope.vocabulary.phases import COLLECTIVE, PHASES

NO_MODULE = "(no module)"
ENGINE = "autograd::engine::evaluate_function"


def covered_by(events: Iterable[Event], step: Event) -> list[tuple[float, float]]:
    """Return the stretches of a step in which at least one of the events is under way."""
    pairs = ((max(event.start, step.start), min(event.end, step.end)) for event in events)
    return union((start, end) for start, end in pairs if end > start)


@dataclass(frozen=True)
class StepView:
    """Events of one recorded step."""

    trace: Trace
    step: Event
    phases: PhaseTimeline
    operators: list[Event]  # on every thread
    calls: list[Event]  # runtime calls that the step made, our own final synchronisation left out
    device_work: list[Event]  # what the step launched

    @property
    def main_operators(self) -> list[Event]:
        """Operators on the thread of the step."""
        return [event for event in self.operators if event.thread == self.step.thread]

    def phase_of(self, work: Event) -> str:
        """Return the phase in which the host launched the work."""
        return self.phases.at(launch_or_operator(self.trace, work).start)


def launch_or_operator(trace: Trace, work: Event) -> Event:
    """Return the host event that launched a piece of work on the GPU; the work itself if that was not recorded."""
    return trace.launch_of(work) or trace.operator_of(work) or work


def step_views(trace: Trace) -> list[StepView]:
    """Return one view a recorded step. Work on the GPU belongs to the step that launched it."""
    phases = PhaseTimeline((e.name, e.start, e.end) for e in trace.annotations if e.name in (*PHASES, WAIT))
    calls = [c for c in trace.calls if c.nearest(lambda e: e.category == ANNOTATION and e.name == WAIT) is None]
    launches = [(launch_or_operator(trace, work).start, work) for work in trace.device_work]

    def of(step: Event, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if step.start <= event.start < step.end]

    return [
        StepView(
            trace,
            step,
            phases,
            of(step, trace.operators),
            of(step, calls),
            [work for launched, work in launches if step.start <= launched < step.end],
        )
        for step in trace.steps
    ]


class ModuleTable:
    """The module an operator worked for: the range around it, or in the backward pass that of its forward operator."""

    def __init__(self, trace: Trace) -> None:
        self._of_sequence: dict[int, str] = {}
        for event in trace.operators:
            number = event.args.get("Sequence number", -1)
            if number >= 0 and not event.args.get("Fwd thread id"):
                module = _range_around(event)
                if module is not None:
                    self._of_sequence[number] = module

    def of(self, operator: Event | None) -> str:
        if operator is None:
            return NO_MODULE
        found = _range_around(operator)
        if found is None:
            node = operator.nearest(lambda e: e.category == OPERATOR and e.name.startswith(ENGINE))
            number = node.args.get("Sequence number", -1) if node is not None else -1
            found = self._of_sequence.get(number)
        return found or NO_MODULE


def _range_around(event: Event) -> str | None:
    around = event.nearest(lambda e: e.category == ANNOTATION and e.name.startswith(MODULE))
    return None if around is None else around.name.removeprefix(MODULE)


def busy_seconds(step: Step) -> float:
    """Return how long kernels and copies of a step run on the GPU; 0 where the profiler sees none."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    recorded = getattr(profiler.profiler, "kineto_results", None)
    ran = [] if recorded is None else [each for each in recorded.events() if each.device_type().name == "CUDA"]
    covered = union((each.start_ns(), each.start_ns() + each.duration_ns()) for each in ran)
    return sum(end - start for start, end in covered) / 1e9


# What is in the name of an operator of c10d, a kernel of NCCL or a range of gloo, by the name that people know.
_KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "sendrecv": "send and receive",
}
# What a rank sends for each byte of the larger side among n ranks, by the ring algorithm; 1 for all others.
_SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts calls and bytes of each collective: bytes of the larger side, input or output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: dict[str, Collective] = {}
        self.dtypes: dict[str, set[torch.dtype]] = {}

    @property
    def bytes(self) -> dict[str, int]:
        return {name: each["bytes"] for name, each in self.collectives.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        return as_without_modes(func, args, sys._getframe().f_back)(*args, **(kwargs or {}))

    def _count(self, operator: str, args: Any) -> None:
        # One side is a list of tensors or a single tensor; a coalesced call has several of each.
        sides = [[leaf for leaf in pytree.tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        tensors = [tensor for side in sides for tensor in side]
        if not tensors:
            return
        name = _kind(operator)
        size = max(sum(tensor.nbytes for tensor in side) for side in sides)
        found = self.collectives.setdefault(name, {"calls": 0, "bytes": 0, "sent_bytes": 0})
        found["calls"] += 1
        found["bytes"] += size
        if name in _SENT:
            boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
            ranks = dist.ProcessGroup.unbox(boxed[0]).size() if boxed else dist.get_world_size()
            size = round(size * _SENT[name](ranks))
        found["sent_bytes"] += size
        self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)


GLOO = "gloo:"  # before the name of a collective, in the range around it on one of gloo's threads


def collective_time(traces: Sequence[Trace]) -> payload.CollectiveTime:
    """Return the collectives of an average step; overlaps count once in `under_way_ms`, each time in `kinds`."""
    views = [view for trace in traces for view in step_views(trace)]
    sums = Sums("count", "ms", steps=len(views))
    under_way = exposed = 0.0
    for view in views:
        # Kernels, or ranges of gloo's threads, that run within the step.
        found = [work for work in view.device_work if kernel_family(work.name) == COLLECTIVE]
        for event in view.trace.annotations:
            if event.name.startswith(GLOO) and event.end > view.step.start and event.start < view.step.end:
                found.append(event)
        for event in found:
            sums.add(_kind(event.name), 1, event.duration / 1e3)
        covered = covered_by(found, view.step)
        under_way += _length(covered)
        others = covered_by((w for w in view.device_work if kernel_family(w.name) != COLLECTIVE), view.step)
        exposed += _length(union([*covered, *others])) - _length(others)
    time: payload.CollectiveTime = {
        "kinds": sums.rows("ms", "collective"),
        "under_way_ms": under_way / 1e3 / len(views),
        "step_ms": sum(view.step.duration for view in views) / 1e3 / len(views),
    }
    if any(trace.on_gpu for trace in traces):
        time["exposed_ms"] = exposed / 1e3 / len(views)
    return time


def _kind(name: str) -> str:
    plain = name.lower().replace("_", "")
    return next((kind for word, kind in _KINDS.items() if word in plain), name.removeprefix(GLOO).strip("_"))


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)

"""Attribution of host and GPU time to phases, operators and modules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dpscope.instruments.trace.capture import MODULE, WAIT
from dpscope.instruments.trace.events import ANNOTATION, OPERATOR, Event, Trace
from dpscope.vocabulary.phases import BETWEEN_PHASES, PHASES

NO_MODULE = "(no module)"
ENGINE = "autograd::engine::evaluate_function"


class PhaseTimeline:
    """The phase at every moment: the open phase that was entered last, on any thread.

    Work that autograd's threads launch during `backward` belongs to that phase, because the main thread waits in it.
    """

    def __init__(self, annotations: Iterable[Event]) -> None:
        open_: list[Event] = []
        edges = [(e, e.start, True) for e in annotations if e.name in (*PHASES, WAIT)]
        edges += [(event, event.end, False) for event, _, _ in edges]
        self._starts: list[float] = []
        self._names: list[str] = []
        for event, moment, opens in sorted(edges, key=lambda edge: (edge[1], edge[2])):
            if opens:
                open_.append(event)
            else:
                open_.remove(event)
            self._starts.append(moment)
            self._names.append(max(open_, key=lambda e: e.start).name if open_ else BETWEEN_PHASES)

    def at(self, moment: float) -> str:
        place = bisect_right(self._starts, moment) - 1
        return self._names[place] if place >= 0 else BETWEEN_PHASES

    def within(self, start: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield every stretch between two moments, with its length. The lengths sum to `end - start`."""
        moment = start
        place = bisect_right(self._starts, start)
        while place < len(self._starts) and self._starts[place] < end:
            yield self.at(moment), self._starts[place] - moment
            moment = self._starts[place]
            place += 1
        yield self.at(moment), end - moment


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the stretches covered by at least one interval, in order, without overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip_to(step: Event, events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the parts of the events that lie within a step."""
    pairs = ((max(event.start, step.start), min(event.end, step.end)) for event in events)
    return [(start, end) for start, end in pairs if end > start]


@dataclass(frozen=True)
class StepView:
    """Events of one recorded step."""

    trace: Trace
    step: Event
    phases: PhaseTimeline
    operators: list[Event]  # on every thread
    calls: list[Event]  # runtime calls that the step made, our own final synchronisation left out
    device_work: list[Event]  # what the step launched

    def phase_of(self, work: Event) -> str:
        """Return the phase in which the host launched the work."""
        return self.phases.at(launch_or_operator(self.trace, work).start)


def launch_or_operator(trace: Trace, work: Event) -> Event:
    """Return the host event that launched a piece of work on the GPU; the work itself if that was not recorded."""
    return trace.launch_of(work) or trace.operator_of(work) or work


def step_views(trace: Trace) -> list[StepView]:
    """Return one view a recorded step. Work on the GPU belongs to the step that launched it."""
    phases = PhaseTimeline(trace.annotations)
    steps = trace.steps

    def of(step: Event, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if step.start <= event.start < step.end]

    def launched(step: Event, work: Event) -> bool:
        return step.start <= launch_or_operator(trace, work).start < step.end

    return [
        StepView(
            trace,
            step,
            phases,
            of(step, trace.operators),
            [call for call in of(step, trace.calls) if not _is_ours(call)],
            [work for work in trace.device_work if launched(step, work)],
        )
        for step in steps
    ]


def _is_ours(call: Event) -> bool:
    return call.nearest(lambda event: event.category == ANNOTATION and event.name == WAIT) is not None


def main_thread_operators(view: StepView) -> list[Event]:
    return [event for event in view.operators if event.thread == view.step.thread]


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

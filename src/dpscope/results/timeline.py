"""Timeline of a step's bytes, as a result file holds it, and the few events that a reader needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from dpscope.results.payloads.memory import TimelinePayload
from dpscope.vocabulary.components import sorted_components
from dpscope.vocabulary.phases import BETWEEN_PHASES


class PhaseSpan(NamedTuple):
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes of each component after every event of one step."""

    events: list[int]
    levels: dict[str, list[int]]  # component -> bytes, one for each event
    phases: list[PhaseSpan]

    @cached_property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.levels.values(), strict=True)]

    @property
    def highest(self) -> dict[str, int]:
        """The most that each component holds."""
        return {key: max(level) for key, level in self.levels.items()}

    @cached_property
    def peak(self) -> int:
        """The index of the first event with the most live bytes."""
        return self.totals.index(max(self.totals))

    def is_in(self, phase: PhaseSpan, event: int) -> bool:
        """Return the phase of each event; one on a border belongs to the later phase, the last to the one it ends."""
        return phase.start <= event and (event < phase.end or phase.end == self.events[-1])

    def phase_at(self, event: int) -> str | None:
        """Return the innermost phase at a moment: `clip` inside `backward` is `clip`. None between phases."""
        inside = [phase for phase in self.phases if self.is_in(phase, event)]
        return min(inside, key=lambda phase: phase.end - phase.start).name if inside else None

    @property
    def peak_phase(self) -> str | None:
        return self.phase_at(self.events[self.peak])

    @property
    def stretches(self) -> list[PhaseSpan]:
        """The phases, and what lies before, between and after them under a name of its own: the whole step."""
        whole: list[PhaseSpan] = []
        reached, end = self.events[0], self.events[-1]
        for phase in [*self.phases, PhaseSpan("", end, end)]:
            whole += [PhaseSpan(BETWEEN_PHASES, reached, phase.start)] if phase.start > reached else []
            whole += [phase] if phase.name else []
            reached = max(reached, phase.end)
        return whole

    def moments(self, most: int) -> list[int]:
        """Return the indices of about `most` events that a drawing needs.

        These are the ends, every component's maximum, the borders of phases, and the highest and lowest total of each
        stretch: the peak is one of them.
        """
        count = len(self.events)
        kept = {0, count - 1, *(level.index(max(level)) for level in self.levels.values())}
        for edge in (edge for phase in self.phases for edge in (phase.start, phase.end)):
            kept.add(max((n for n, event in enumerate(self.events) if event <= edge), default=0))
            kept.add(next((n for n, event in enumerate(self.events) if event >= edge), count - 1))
        return thin(self.totals, kept, most)


def timeline_in(payload: TimelinePayload) -> Timeline | None:
    """Return the timeline of a result; None if there is none that can be drawn."""
    keys, points = payload.get("components"), payload.get("points", [])
    if not keys or len(points) < 2 or any(len(point) != len(keys) + 1 for point in points):
        return None
    events, *levels = (list(column) for column in zip(*points, strict=True))
    if any(later < earlier for earlier, later in pairwise(events)):
        return None
    first, last = events[0], events[-1]
    phases = [PhaseSpan(p["name"], max(p["start"], first), min(p["end"], last)) for p in payload.get("phases", [])]
    known = sorted((phase for phase in phases if phase.end >= phase.start), key=lambda phase: phase.start)
    return Timeline(events, sorted_components(dict(zip(keys, levels, strict=True))), known)


def thin(totals: Sequence[int], kept: Iterable[int], most: int) -> list[int]:
    """Return the indices of about `most` events: those of `kept`, and the highest and lowest total of each stretch."""
    chosen, count = set(kept), len(totals)
    if count <= most:
        return list(range(count))
    stretches = max((most - len(chosen)) // 2, 1)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        chosen |= {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(chosen)

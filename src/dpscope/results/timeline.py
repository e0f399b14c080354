"""How the bytes of one step come and go, as a result file holds it; and how few of its events a reader needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from dpscope.results.payloads.memory import TimelinePayload
from dpscope.vocabulary.components import sorted_components


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


def timeline_in(payload: TimelinePayload) -> Timeline | None:
    """None where there is none, or none that can be drawn."""
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
    """Indices of about `most` events: those of `kept`, and the highest and the lowest total of each stretch; of all
    events where there are no more."""
    chosen, count = set(kept), len(totals)
    if count <= most:
        return list(range(count))
    stretches = max((most - len(chosen)) // 2, 1)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        chosen |= {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(chosen)

"""Stretches of time: their union, and the innermost phase at every moment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from dpscope.vocabulary.phases import BETWEEN_PHASES

Interval = tuple[float, float]  # start, end


class PhaseTimeline:
    """The phase at every moment: the open phase that was entered last, on any thread.

    Work that autograd's threads launch during `backward` belongs to that phase, because the main thread waits in it.
    """

    def __init__(self, phases: Iterable[tuple[str, float, float]]) -> None:
        """Take (name, start, end) of every phase, an outer one before an inner one that starts with it."""
        open_: list[tuple[str, float, float]] = []
        edges = [(each, each[1], True) for each in phases]
        edges += [(each, each[2], False) for each, _, _ in edges]
        self._starts: list[float] = []
        self._names: list[str] = []
        for each, moment, opens in sorted(edges, key=lambda edge: edge[1:]):
            if opens:
                open_.append(each)
            else:
                open_.remove(each)
            self._starts.append(moment)
            self._names.append(open_[-1][0] if open_ else BETWEEN_PHASES)

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


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the stretches covered by at least one interval, in order, without overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged

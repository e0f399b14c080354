"""Which moments of a timeline a drawing needs."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.reports.memory.data import Timeline

MOMENTS = 400  # a panel is hardly wider in pixels


def moments(timeline: Timeline, most: int = MOMENTS) -> list[int]:
    """Indices of events, about `most`: the ends, every component's maximum, those at the borders of phases, and the
    highest and the lowest total of each stretch: the peak is one of them."""
    count = len(timeline.events)
    if count <= most:
        return list(range(count))
    totals = timeline.totals
    kept = {0, count - 1}
    kept |= {level.index(max(level)) for level in timeline.levels.values()}
    kept |= {
        n for phase in timeline.phases for edge in (phase.start, phase.end) for n in _around(timeline.events, edge)
    }
    stretches = max((most - len(kept)) // 2, 1)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        kept |= {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(kept)


def _around(events: Sequence[float], edge: float) -> tuple[int, int]:
    """The last event up to a border, and the first from it on."""
    before = max((n for n, event in enumerate(events) if event <= edge), default=0)
    after = next((n for n, event in enumerate(events) if event >= edge), len(events) - 1)
    return before, after

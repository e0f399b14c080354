"""How the bytes of one step come and go, by component: a panel a method, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dpscope.reports.memory.chart_series import looks, unit_for, without
from dpscope.reports.memory.data import PhaseSpan, Timeline, composition_of, present, timeline_of, why_no_timeline
from dpscope.reports.memory.thinning import moments
from dpscope.reports.page.chart import Table, TableValue, View, chart_by_size
from dpscope.reports.palette import phase_colour
from dpscope.reports.tables import Row
from dpscope.units import format_bytes
from dpscope.vocabulary.phases import BETWEEN_PHASES

PANELS = 6  # more on one scale are too many to look at


def _view(rows: Sequence[Row]) -> View | None:
    timelines = [(row, timeline) for row in rows if (timeline := timeline_of(row))]
    if not timelines:
        return None
    drawn = timelines[:PANELS]
    missing = [(row, why_no_timeline(row)) for row in rows if not timeline_of(row)]
    missing += [(row, f"only {PANELS} fit") for row, _ in timelines[PANELS:]]
    keys = present({key: max(level) for key, level in timeline.levels.items()} for _, timeline in drawn)
    highest = max(timeline.totals[timeline.peak] for _, timeline in drawn)
    return View(
        says=f"Live bytes are highest {', '.join(_in_words(*each) for each in drawn)}.{without(missing)}",
        data={
            "components": looks(keys),
            "panels": [_panel(row, timeline, keys) for row, timeline in drawn],
            "unit": unit_for(highest),
            "highest": highest,
        },
        table=Table(
            columns=("method", "phase", "first_event", "last_event", "highest_bytes", *(f"{k}_bytes" for k in keys)),
            rows=[line for row, timeline in drawn for line in _by_phase(row.method, timeline, keys)],
        ),
    )


def _panel(row: Row, timeline: Timeline, keys: Sequence[str]) -> dict[str, Any]:
    """Events and levels as changes from one moment to the next: most are 0, which keeps the page small, to the byte."""
    kept = moments(timeline)
    composition = composition_of(row)
    at = timeline.peak
    return {
        "method": row.method,
        "maker": composition.maker if composition else None,
        "peak": {"event": timeline.events[at], "bytes": timeline.totals[at]},
        "phases": [[p.name, p.start, p.end, phase_colour(p.name)] for p in stretches(timeline)],
        "events": _changes([timeline.events[n] for n in kept]),
        "levels": [_changes([timeline.levels[key][n] for n in kept]) if key in timeline.levels else [] for key in keys],
    }


def stretches(timeline: Timeline) -> list[PhaseSpan]:
    """The phases, and what lies before, between and after them under a name of its own: the whole step."""
    whole: list[PhaseSpan] = []
    reached, end = timeline.events[0], timeline.events[-1]
    for phase in timeline.phases:
        if phase.start > reached:
            whole.append(PhaseSpan(BETWEEN_PHASES, reached, phase.start))
        whole.append(phase)
        reached = max(reached, phase.end)
    return [*whole, *([PhaseSpan(BETWEEN_PHASES, reached, end)] if end > reached else [])]


def _changes(values: Sequence[int]) -> list[int]:
    return [*values[:1], *(later - earlier for earlier, later in pairwise(values))]


def _by_phase(method: str, timeline: Timeline, keys: Sequence[str]) -> list[tuple[TableValue, ...]]:
    """The fullest moment of each phase."""
    lines: list[tuple[TableValue, ...]] = []
    for phase in timeline.phases:
        within = [n for n, event in enumerate(timeline.events) if phase.start <= event <= phase.end]
        if within:
            at = max(within, key=timeline.totals.__getitem__)
            held = [timeline.levels[key][at] if key in timeline.levels else 0 for key in keys]
            lines.append((method, phase.name, phase.start, phase.end, timeline.totals[at], *held))
    return lines


def phase_at(phases: Sequence[PhaseSpan], event: float) -> str:
    """The innermost: what runs inside `clip` inside `backward` belongs to `clip`."""
    inside = [phase for phase in phases if phase.start <= event <= phase.end]
    return min(inside, key=lambda phase: phase.end - phase.start).name if inside else BETWEEN_PHASES


def _in_words(row: Row, timeline: Timeline) -> str:
    where = phase_at(timeline.phases, timeline.events[timeline.peak])
    return f"in {row.method} at {format_bytes(timeline.totals[timeline.peak])} ({where})"


memory_timeline = chart_by_size(
    _view,
    key="memory-timeline",
    title="Memory over one training step",
    nav_label="Timeline",
    kind="memory-timeline",
    how=(
        "Live bytes after every allocation and free of one step, thinned out for this page; every highest value is "
        "kept as measured. It does not see time (a step to the right is an event, not a millisecond), nor what is "
        "unattributed."
    ),
)

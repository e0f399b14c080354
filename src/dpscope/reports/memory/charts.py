"""The page's charts of memory: what the peak is made of, its largest tensors, and how bytes come and go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dpscope.reports.drawing import byte_unit, not_drawn
from dpscope.reports.looks import colour_of, is_dark, phase_colour
from dpscope.reports.memory import text
from dpscope.reports.memory.text import TRIFLE, signed
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.tables import Row
from dpscope.results.derived import Timeline, maker_of, place_of, shape_in_words
from dpscope.results.payloads.memory import TensorAtPeak, TensorsAtPeak
from dpscope.units import format_bytes, format_ratio
from dpscope.vocabulary.components import component_named
from dpscope.vocabulary.phases import BETWEEN_PHASES

BARS_DRAWN = 8  # tensors of each method
PANELS = 6  # timelines; more on one scale are too many to look at
MOMENTS = 400  # of a timeline: a panel is hardly wider in pixels


def look_of(key: str) -> dict[str, Any]:
    """Return how a component is drawn and named."""
    component, colour = component_named(key), colour_of(key)
    ink = "#ffffff" if is_dark(colour) else "#000000"
    named = {"name": component.label, "label": component.marked()}
    return {**named, "colour": colour, "ink": ink, "hatched": component.private_only}


def unit_for(largest: float) -> dict[str, Any]:
    """Return the unit of an axis: ticks that are round numbers of bytes are not round in GiB."""
    return dict(zip(("size", "name"), byte_unit(largest), strict=True))


def _without(reasons: Sequence[tuple[Row, str]]) -> str:
    """Return a sentence on the rows that a chart leaves out, to append to another."""
    return "".join(f" {note}." for note in not_drawn(reasons))


@chart_by_size(
    key="memory-peak",
    title="Memory at the peak, by component",
    nav_label="Memory",
    how=(
        "Every storage was followed from birth to death through one step; shown is the moment at which most bytes "
        "were live, and unattributed is what the allocator counted beyond that. It does not see memory outside "
        "PyTorch's allocator, nor what the allocator keeps in reserve."
    ),
)
def memory_peak(rows: Sequence[Row]) -> View | None:
    """Return the bars of each peak by component."""
    described = text.described_of(rows)
    if not described:
        return None
    keys = text.present(composition.components for composition in described.values())
    standard = text.standard_of(described)
    bars: list[dict[str, Any]] = [
        {
            **{"method": row.method, "maker": each.maker, "total": each.total, "ratio": each.ratio_to(standard)},
            "bytes": [each.components.get(key, 0) for key in keys],
        }
        for row, each in described.items()
    ]
    told = []  # `flat holds 52.8 GiB (1.75×, above all per-sample gradients +18.9 GiB)`
    for row, each in described.items():
        ratio, named = each.ratio_to(standard), ""
        if standard and each is not standard and ratio is not None:
            extra = each.extra_over(standard)
            most = (max if sum(extra.values()) >= 0 else min)(extra, key=extra.__getitem__)
            much = abs(extra[most]) >= TRIFLE * standard.total
            above_all = f", above all {component_named(most).label} {signed(extra[most])}" if much else ""
            named = f" ({format_ratio(ratio)}{above_all})"
        told.append(f"{row.method} holds {format_bytes(each.total)}{named}")
    return View(
        says=f"At the peak {', '.join(told)}.{_without(text.undescribed(rows))}",
        data={
            "components": [*map(look_of, keys)],
            "bars": bars,
            "standard": next((place for place, each in enumerate(described.values()) if each is standard), None),
            "unit": unit_for(max(bar["total"] for bar in bars)),
        },
        table=Table(
            columns=("method", "total_bytes", "ratio_to_standard", *(f"{key}_bytes" for key in keys), "reached_in"),
            rows=[(bar["method"], bar["total"], bar["ratio"], *bar["bytes"], bar["maker"]) for bar in bars],
        ),
    )


@chart_by_size(
    key="tensors",
    title="Largest tensors at the peak",
    nav_label="Tensors",
    how=(
        "Every storage that was live at the peak of a tracked step, the largest first, with the shape it was made "
        "in, what it is for, and the innermost line of Python outside torch that asked for it; alike ones of "
        "several layers share a bar, which is as long as one of them. It does not see what an operator allocates "
        "and frees inside itself."
    ),
)
def tensors_at_peak(rows: Sequence[Row]) -> View | None:
    """Return the largest tensors at each peak."""
    known = [(row.method, tensors) for row in rows if (tensors := text.tensors_of(row))]
    if not known:
        return None
    panels = [{"method": method, "bars": [*map(_bar, tensors["largest"][:BARS_DRAWN])]} for method, tensors in known]
    told = []
    for method, tensors in known:
        first = tensors["largest"][0]
        several = f"{first['count']} of them, each" if first["count"] > 1 else "it is"
        what = f"{shape_in_words(first)}, {component_named(first['component']).label}, {place_of(first, short=True)}"
        told.append(f"The largest of {method}: {several} {format_bytes(first['bytes'])} ({what}).")
    largest = max(tensor["bytes"] for _, tensors in known for tensor in tensors["largest"])
    return View(
        says=" ".join(told),
        data={"axis": unit_for(largest), "panels": panels},
        table=Table.of([line for each in known for line in _tensor_lines(*each)]),
    )


def _bar(tensor: TensorAtPeak) -> dict[str, Any]:
    maker, made = maker_of(tensor), bool(tensor["operator"])
    return {
        **look_of(tensor["component"]),
        **{"bytes": tensor["bytes"], "count": tensor["count"], "shape": shape_in_words(tensor), "maker": maker},
        "where": place_of(tensor) if made else f"{maker}, {place_of(tensor)}",
        "short": place_of(tensor, short=True) if made else maker,
        "phase": tensor["phase"],
    }


def _tensor_lines(method: str, tensors: TensorsAtPeak) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {
            **{"method": method, "bytes": each["bytes"], "count": each["count"]},
            **{"shape": "×".join(map(str, each["shape"])), "dtype": each["dtype"]},
            **{"component": component_named(each["component"]).label, "module": each["module"], "phase": each["phase"]},
            **{"operator": each["operator"], "line": place_of(each)},
        }
        for each in tensors["largest"]
    ]
    rest = {"method": method, "bytes": tensors["rest"]["bytes"], "count": 1, "component": "all others together"}
    return [*lines, dict.fromkeys(lines[0], "") | rest] if rest["bytes"] else lines


@chart_by_size(
    key="memory-timeline",
    title="Memory over one training step",
    nav_label="Timeline",
    how=(
        "Live bytes after every allocation and free of one step, thinned out for this page; every highest value "
        "is kept as measured. It does not see time (a step to the right is an event, not a millisecond), nor what "
        "is unattributed."
    ),
)
def memory_timeline(rows: Sequence[Row]) -> View | None:
    """Return the live bytes of each method over a step."""
    timelines = [(row, timeline) for row in rows if (timeline := text.timeline_of(row))]
    if not timelines:
        return None
    drawn = timelines[:PANELS]
    missing = [(row, row.why_none("no timeline was measured")) for row in rows if not text.timeline_of(row)]
    missing += [(row, f"only {PANELS} fit") for row, _ in timelines[PANELS:]]
    keys = text.present(timeline.highest for _, timeline in drawn)
    highest = max(timeline.totals[timeline.peak] for _, timeline in drawn)
    told = [
        f"in {row.method} at {format_bytes(each.totals[each.peak])} ({each.peak_phase or BETWEEN_PHASES})"
        for row, each in drawn
    ]
    return View(
        says=f"Live bytes are highest {', '.join(told)}.{_without(missing)}",
        data={
            "components": [*map(look_of, keys)],
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
    """Return events and levels as differences between moments: most are 0, which keeps the page small."""
    kept, at, composition = timeline.moments(MOMENTS), timeline.peak, text.composition_of(row)
    return {
        "method": row.method,
        "maker": composition.maker if composition else None,
        "peak": {"event": timeline.events[at], "bytes": timeline.totals[at]},
        "phases": [[*phase, phase_colour(phase.name)] for phase in timeline.stretches],
        "events": _changes([timeline.events[n] for n in kept]),
        "levels": [_changes([timeline.levels[key][n] for n in kept]) if key in timeline.levels else [] for key in keys],
    }


def _changes(values: Sequence[int]) -> list[int]:
    return [*values[:1], *(later - earlier for earlier, later in pairwise(values))]


def _by_phase(method: str, timeline: Timeline, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the fullest moment of each phase."""
    lines: list[tuple[Any, ...]] = []
    for phase in timeline.phases:
        within = [n for n, event in enumerate(timeline.events) if timeline.is_in(phase, event)]
        if within:
            at = max(within, key=timeline.totals.__getitem__)
            held = [timeline.levels[key][at] if key in timeline.levels else 0 for key in keys]
            lines.append((method, *phase, timeline.totals[at], *held))
    return lines

"""Memory as charts of the page and as figures: the peak by component, its largest tensors, and bytes over a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from dpscope.reports import drawing
from dpscope.reports.drawing import BarPanel, byte_unit, draw_bars, filled, not_drawn
from dpscope.reports.looks import colour_of, is_dark, phase_colour, shorten
from dpscope.reports.memory import text
from dpscope.reports.memory.text import TRIFLE, composition_of, present, signed, timeline_of
from dpscope.reports.output import figure_output
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.tables import Row
from dpscope.results.derived import Timeline, maker_of, place_of, shape_in_words
from dpscope.results.payloads.memory import TensorAtPeak, TensorsAtPeak
from dpscope.units import format_bytes, format_ratio, three_digits
from dpscope.vocabulary.components import component_named
from dpscope.vocabulary.phases import BETWEEN_PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    keys = present(composition.components for composition in described.values())
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
    timelines = [(row, timeline) for row in rows if (timeline := timeline_of(row))]
    if not timelines:
        return None
    drawn = timelines[:PANELS]
    missing = [(row, row.why_none("no timeline was measured")) for row in rows if not timeline_of(row)]
    missing += [(row, f"only {PANELS} fit") for row, _ in timelines[PANELS:]]
    keys = present(timeline.highest for _, timeline in drawn)
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
    kept, at, composition = timeline.moments(MOMENTS), timeline.peak, composition_of(row)
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


HEADROOM = 1.32  # of the highest peak: where peaks are written
PANEL = 1.6  # inches
STRIP = 1.01, 1.11  # of a panel's height: the phases
GREYS = "0.9", "0.8"  # in turns: components have the colours
LETTER = 0.0075  # of the width of all panels: a letter of a phase's name
TITLE_PAD = 18.0  # points from a panel to the method's name
LONGEST_TITLE, LONGEST_MAKER = 60, 64  # characters, over the whole width
EVENTS = "allocations and frees within the step, in order"
STAGES = "stages of the run (total only)"
MANY_PANELS = 4  # beyond that they stand in two columns


def draw_breakdown(rows: Sequence[Row]) -> Figure | None:
    """Return the chart of peaks, of rows of one size, and beside it what each method holds beyond standard."""
    chart = memory_peak(rows)
    if chart is None:
        return None
    shown = chart.views[0].data
    looks = {each["label"]: filled(each["colour"], each["hatched"]) for each in shown["components"]}
    bars, names, held = shown["bars"], [bar["method"] for bar in shown["bars"]], [bar["bytes"] for bar in shown["bars"]]
    unit, name = byte_unit(max(bar["total"] for bar in bars))
    at_peak = BarPanel(
        names=names,
        parts=_parts(looks, held, unit),
        ends=[f"{three_digits(bar['total'] / unit)} {name}" for bar in bars],
        axis=f"at the peak ({name})",
    )
    title = (
        "Memory at the peak of a training step",
        drawing.describe(rows),
        *not_drawn(text.undescribed(rows)),
    )
    return draw_bars(title, [at_peak, _extra(names, held, shown["standard"], looks)], looks, columns=2, one_scale=False)


def _extra(
    names: Sequence[str], held: Sequence[Sequence[float]], standard: int | None, looks: Iterable[str]
) -> BarPanel:
    """Draw each method's bytes beyond standard's by component: more to the right, less to the left."""
    if standard is None or len(names) == 1:
        reason = "no standard at this size" if standard is None else "standard is the only method"
        return BarPanel(names=(), parts={}, ends=(), axis=f"nothing to compare with:\n{reason}")
    extras = [[count - own for count, own in zip(counts, held[standard], strict=True)] for counts in held]
    unit, name = byte_unit(max(sum(map(abs, extra)) for extra in extras))
    ends = []
    for place, extra in enumerate(extras):
        amount = three_digits(abs(sum(extra)) / unit)
        sign = "±" if not float(amount) else "+" if sum(extra) > 0 else "−"
        ends.append("standard" if place == standard else f"{sign}{amount} {name}")
    axis = f"more than standard holds ({name}); line: net"
    return BarPanel(names=names, parts=_parts(looks, extras, unit), ends=ends, axis=axis, net=True)


def _parts(labels: Iterable[str], stacks: Sequence[Sequence[float]], unit: float) -> dict[str, list[float | None]]:
    """Turn the components of each bar into the bars of each component."""
    return {label: [stack[n] / unit for stack in stacks] for n, label in enumerate(labels)}


@drawing.styled
def draw_timeline(rows: Sequence[Row]) -> Figure | None:
    """Draw the rows of one size; None if none of them has a timeline or snapshots."""
    found = [(row, timeline_of(row), text.snapshots_of(row)) for row in rows]
    drawn = [(row, timeline, stages) for row, timeline, stages in found if timeline or stages]
    if not drawn:
        return None
    timelines = [timeline for _, timeline, _ in drawn if timeline]
    columns = 1 if len(drawn) <= MANY_PANELS else 2
    figure, axes = drawing.new_panels(len(drawn), columns, 1.3, [PANEL] * -(-len(drawn) // columns), sharey=True)
    heading = "Memory over one training step" if timelines else "Memory at the stages of a run"
    missing = [(row, row.why_none("no timeline was measured")) for row, *known in found if not any(known)]
    drawing.set_title(figure, heading, drawing.describe(rows), *not_drawn(missing))
    highest = max(max(timeline.totals if timeline else stages.values()) for _, timeline, stages in drawn)
    unit, name = byte_unit(highest)
    same_stages = not timelines and len({tuple(stages) for _, _, stages in drawn}) == 1
    for number, ((row, timeline, stages), ax) in enumerate(zip(drawn, axes, strict=True)):
        above = shorten(row.method, LONGEST_TITLE // columns)
        ax.set_title(above, loc="left", fontweight="bold", pad=TITLE_PAD if timeline else None)
        if timeline:
            _draw_components(ax, timeline, unit)
            _draw_phases(ax, timeline, LETTER * columns)
            _mark_peak(ax, row, timeline, (unit, name), LONGEST_MAKER // columns)
        else:
            # What older files have: the total at named stages of the run.
            places, names = range(len(stages)), [shorten(name, 22) for name in stages]
            ax.step(places, [count / unit for count in stages.values()], where="post", color="black", linewidth=1.0)
            step = -(-len(stages) // 12)
            ax.set_xticks(places[::step], names[::step], rotation=30, ha="right")
        ax.set_ylabel(f"live memory ({name})" if number % columns == 0 else "")
        if number + columns >= len(drawn):
            ax.set_xlabel(EVENTS if timelines else STAGES)
        elif same_stages:  # the lowest panels name them
            ax.tick_params(labelbottom=False)
    axes[0].set_ylim(0, HEADROOM * highest / unit or 1)
    if timelines:
        keys = present(timeline.highest for timeline in timelines)
        drawing.patch_legend(figure, {component_named(key).marked(): _fill_of(key) for key in keys}, 4)
    drawing.settle(figure)
    return figure


def _fill_of(component: str) -> dict[str, Any]:
    return filled(colour_of(component), component_named(component).private_only)


def _draw_components(ax: Axes, timeline: Timeline, unit: float) -> None:
    """Draw stacked areas; a level holds from its event to the next."""
    events = timeline.events
    floor = [0.0] * len(events)
    for key, level in timeline.levels.items():
        top = [low + count / unit for low, count in zip(floor, level, strict=True)]
        if any(level):
            ax.fill_between(events, floor, top, step="post", label=key, **{**_fill_of(key), "linewidth": 0.0})
        floor = top
    ax.set_xlim(events[0], max(events[-1], events[0] + 1))


def _draw_phases(ax: Axes, timeline: Timeline, letter: float) -> None:
    """Draw each phase as a strip above the panel with its name, between lines where it begins and ends.

    letter: of the panel's width. Names wider than their strips stand above these, those of neighbours together.
    """
    whole = timeline.events[-1]
    for number, phase in enumerate(timeline.phases):
        ax.axvspan(phase.start, phase.end, *STRIP, clip_on=False, gid="phase", color=GREYS[number % 2], linewidth=0)
        for edge in (phase.start, phase.end):
            ax.axvline(edge, color="0.35", linewidth=0.5, linestyle=(0, (4, 2)))
    for fits, group in groupby(timeline.phases, lambda each: len(each.name) * letter * whole < each.end - each.start):
        for phases in [[each] for each in group] if fits else [list(group)]:
            start, end = phases[0].start, phases[-1].end
            is_late = start + end > whole
            look = {"ha": "center", "va": "center"} if fits else {"ha": "right" if is_late else "left", "va": "bottom"}
            x = (start + end) / 2 if fits else end if is_late else start
            words = ", ".join(phase.name for phase in phases)
            place = {"transform": ax.get_xaxis_transform(), "gid": "phase", "fontsize": drawing.SMALL}
            ax.text(x, sum(STRIP) / 2 if fits else STRIP[1], words, **look, **place)


def _mark_peak(ax: Axes, row: Row, timeline: Timeline, unit: tuple[float, str], longest: int) -> None:
    """Mark the peak and, in the headroom above, write its value and what made it."""
    event, total = timeline.events[timeline.peak], timeline.totals[timeline.peak] / unit[0]
    composition = composition_of(row)
    made = f" in {shorten(composition.maker, longest)}" if composition and composition.maker else ""
    ax.plot(event, total, marker="v", markersize=4, color="black", clip_on=False, zorder=5)
    words = f"peak {three_digits(total)} {unit[1]}{made}"
    box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    look: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": drawing.SMALL, "gid": "peak", "bbox": box}
    ax.text(0.995, 0.97, words, transform=ax.transAxes, **look)


MEMORY_FIGURES = (
    figure_output("memory_breakdown_comparison", "the peak of each method by component", draw_breakdown),
    figure_output("memory_timeline", "live bytes by component over a step", draw_timeline),
)

"""`memory_breakdown_comparison`, what each method's peak is made of and what it holds beyond ordinary training, and
`memory_timeline`, how the bytes of one step come and go: a panel a method, on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures import style
from dpscope.reports.figures.labels import in_figure, spread
from dpscope.reports.memory import data
from dpscope.reports.output import figure_output
from dpscope.reports.palette import colour_of, is_dark
from dpscope.reports.tables import Row
from dpscope.reports.words import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

BAR = 0.6  # of the distance between two methods
LONGEST_TICK = 24  # characters
HEADROOM = 1.32  # of the highest peak: where peaks are labelled
PANEL, STRIP = 1.3, 0.32  # inches: a panel, and the names of the phases above it
TITLE_PAD = 17.0  # points from a panel to the method's name: the phases' names fit below it
LONGEST_TITLE = 60  # characters, over the whole width
GAP = 3.0  # points between two names of phases
EVENTS = "allocations and frees within the step, in order"
STAGES = "stages of the run (total only)"
MANY_PANELS = 4  # beyond that they stand in two columns

Segments = list[tuple[Any, str, float]]  # a bar, its component and its value


@style.styled
def draw_breakdown(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size; None if none of them has a breakdown."""
    described = data.described_of(rows)
    shown = list(described.values())
    if not shown:
        return None
    figure = style.new_figure(1.6 + 0.36 * len(shown))
    peak, extra = figure.subplots(1, 2, sharey=True)
    peak.set_yticks(range(len(shown)), [shorten(row.method, LONGEST_TICK) for row in described])
    peak.set_ylim(len(shown) - 0.5, -0.5)
    style.component_legend(figure, data.present(each.components for each in shown))
    notes = style.not_drawn(data.undescribed(rows))
    style.set_title(figure, "Memory at the peak of a training step", style.describe(rows), *notes)
    unit, name = style.byte_unit(max(each.total for each in shown))
    peak.set_xlabel(f"at the peak ({name})")
    totals = [f"{style.three_digits(each.total / unit)} {name}" for each in shown]
    segments = _stack(peak, [each.components for each in shown], unit, totals)
    segments += _draw_extra(extra, described)
    style.settle(figure)
    _write_values(segments)
    return figure


def _draw_extra(ax: Axes, described: Mapping[Row, data.Composition]) -> Segments:
    """Each method's bytes beyond standard's, component by component: more to the right, less to the left."""
    standard = data.standard_of(described)
    if standard is None or len(described) == 1:
        reason = "no standard at this size" if standard is None else "standard is the only method"
        ax.text(0.5, 0.5, f"nothing to compare with:\n{reason}", transform=ax.transAxes, ha="center", va="center")
        ax.set_axis_off()
        return []
    extras = [composition.extra_over(standard) for composition in described.values()]
    unit, name = style.byte_unit(max(sum(abs(count) for count in extra.values()) for extra in extras))
    ax.set_xlabel(f"more than standard holds ({name}); line: net")
    ax.axvline(0, color="black", linewidth=0.6)
    ax.tick_params(left=False, labelleft=False)
    ax.spines["left"].set_visible(False)
    nets = [sum(extra.values()) / unit for extra in extras]
    texts = []
    for composition, net in zip(described.values(), nets, strict=True):
        amount = style.three_digits(abs(net))
        sign = "±" if not float(amount) else "+" if net > 0 else "−"
        texts.append("standard" if composition is standard else f"{sign}{amount} {name}")
    segments = _stack(ax, extras, unit, texts)
    for place, net in enumerate(nets):
        ax.plot([0, net], [place + BAR / 2 + 0.1] * 2, color="black", linewidth=1.6, solid_capstyle="butt")
    return segments


def _stack(ax: Axes, stacks: Sequence[Mapping[str, float]], unit: float, texts: Sequence[str]) -> Segments:
    """Bars of stacked components, what is below zero to the left of it, with a text at the right end of each."""
    segments = []
    for place, components in enumerate(stacks):
        ends = {True: 0.0, False: 0.0}
        for key, count in components.items():
            value, more = count / unit, count > 0
            if value:
                (bar,) = ax.barh(place, value, BAR, left=ends[more], **style.look_of(key))
                bar.set_gid(f"{key}:{place}")
                segments.append((bar, key, value))
                ends[more] += value
    for place, (components, text) in enumerate(zip(stacks, texts, strict=True)):
        end = sum(count for count in components.values() if count > 0) / unit
        ax.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=style.SMALL)
    return segments


def _write_values(segments: Segments) -> None:
    """The value inside every segment that has room for it."""
    for bar, key, value in segments:
        middle = bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2
        ink = "white" if is_dark(colour_of(key)) else "black"
        centred: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "fontsize": style.SMALL}
        text = bar.axes.text(*middle, style.three_digits(abs(value)), **centred)
        if style.look_of(key)["hatch"]:  # figures are not read through a hatch
            text.set_bbox({"boxstyle": "square,pad=0.15", "facecolor": colour_of(key), "edgecolor": "none"})
        if text.get_window_extent().width > bar.get_window_extent().width - 4:
            text.remove()


@style.styled
def draw_timeline(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size; None if none of them has a timeline or snapshots."""
    found = [(row, data.timeline_of(row), data.snapshots_of(row)) for row in rows]
    drawn = [(row, timeline, stages) for row, timeline, stages in found if timeline or stages]
    if not drawn:
        return None
    timelines = [timeline for _, timeline, _ in drawn if timeline]
    columns = 1 if len(drawn) <= MANY_PANELS else 2
    lines = -(-len(drawn) // columns)
    figure = style.new_figure(1.3 + lines * (PANEL + STRIP))
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for spare in axes[len(drawn) :]:
        spare.set_axis_off()
    heading = "Memory over one training step" if timelines else "Memory at the stages of a run"
    missing = [(row, row.why_none("no timeline was measured")) for row, *known in found if not any(known)]
    style.set_title(figure, heading, style.describe(rows), *style.not_drawn(missing))
    highest = max(max(timeline.totals if timeline else stages.values()) for _, timeline, stages in drawn)
    unit, name = style.byte_unit(highest)
    for (row, timeline, stages), ax in zip(drawn, axes, strict=False):
        above = shorten(row.method, LONGEST_TITLE // columns)
        ax.set_title(above, loc="left", fontweight="bold", pad=TITLE_PAD if timeline else None)
        if timeline:
            _draw_components(ax, timeline, unit)
        else:
            _draw_stages(ax, stages, unit)
        ax.set_ylabel(f"live memory ({name})" if ax.get_subplotspec().is_first_col() else "")
    lowest = axes[max(len(drawn) - columns, 0) : len(drawn)]
    for ax in lowest:
        ax.set_xlabel(EVENTS if timelines else STAGES)
    if not timelines and len({tuple(stages) for _, _, stages in drawn}) == 1:
        for ax in axes[: len(drawn) - len(lowest)]:
            ax.tick_params(labelbottom=False)  # every run went through the same stages
    axes[0].set_ylim(0, HEADROOM * highest / unit or 1)
    if timelines:
        style.component_legend(figure, data.present(timeline.highest for timeline in timelines))
    style.settle(figure)
    for (row, timeline, _), ax in zip(drawn, axes, strict=False):
        if timeline:
            _name_phases(ax, timeline.phases)
            _mark_peak(ax, row, timeline, (unit, name))
    return figure


def _draw_components(ax: Axes, timeline: data.Timeline, unit: float) -> None:
    """Stacked areas; a level holds from its event to the next."""
    events = timeline.events
    floor = [0.0] * len(events)
    for key, level in timeline.levels.items():
        top = [low + count / unit for low, count in zip(floor, level, strict=True)]
        if any(level):
            ax.fill_between(events, floor, top, step="post", label=key, **{**style.look_of(key), "linewidth": 0.0})
        floor = top
    ax.set_xlim(events[0], max(events[-1], events[0] + 1))
    for edge in (edge for phase in timeline.phases for edge in (phase.start, phase.end)):
        ax.axvline(edge, color="0.35", linewidth=0.5, linestyle=(0, (4, 2)))


def _draw_stages(ax: Axes, stages: Mapping[str, float], unit: float) -> None:
    """What older files have: the total at named stages of the run."""
    places, names = range(len(stages)), [shorten(name, 22) for name in stages]
    ax.step(places, [count / unit for count in stages.values()], where="post", color="black", linewidth=1.0)
    step = -(-len(stages) // 12)
    ax.set_xticks(places[::step], names[::step], rotation=30, ha="right")


def _name_phases(ax: Axes, phases: Sequence[data.PhaseSpan]) -> None:
    """Names in a strip above the panel, moved aside where phases are short, with a line to the phase they name."""
    from matplotlib.lines import Line2D

    scale, frame, in_page = ax.figure.dpi / 72, ax.get_window_extent(), ax.figure.transFigure
    texts = [ax.text(0, 0, phase.name, fontsize=style.SMALL, ha="center", va="bottom") for phase in phases]
    widths = [text.get_window_extent().width for text in texts]
    named = _that_fit(phases, widths, frame.width, GAP * scale)
    centres = [ax.transData.transform(((p.start + p.end) / 2, 0))[0] for p in phases]
    places = spread([centres[n] for n in named], [widths[n] for n in named], frame.x0, frame.x1, GAP * scale)
    for number, place in zip(named, places, strict=True):
        start, end = (in_figure(ax, at) for at in ((centres[number], frame.y1), (place, frame.y1 + 5 * scale)))
        texts[number].set(transform=in_page, position=end, gid="phase")
        line = Line2D(*zip(start, end, strict=True), color="0.35", linewidth=0.5, transform=in_page, clip_on=False)
        ax.figure.add_artist(line)
    for number, text in enumerate(texts):
        if number not in named:
            text.remove()


def _that_fit(phases: Sequence[data.PhaseSpan], widths: Sequence[float], room: float, gap: float) -> list[int]:
    """The longest phases whose names fit side by side, in their order."""
    longest = sorted(range(len(phases)), key=lambda n: phases[n].start - phases[n].end)
    used = list(accumulate(widths[n] + gap for n in longest))
    return sorted(n for n, total in zip(longest, used, strict=True) if total <= room)


def _mark_peak(ax: Axes, row: Row, timeline: data.Timeline, unit: tuple[float, str]) -> None:
    """A marker at the peak and, in the headroom above, its value and what made it."""
    event, total = timeline.events[timeline.peak], timeline.totals[timeline.peak] / unit[0]
    composition = data.composition_of(row)
    ax.plot(event, total, marker="v", markersize=4, color="black", clip_on=False, zorder=5)
    start, end = ax.get_xlim()
    left = (event - start) / (end - start) < 0.5
    room = ax.get_window_extent().width * ((end - event) if left else (event - start)) / (end - start)
    line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "relpos": (0 if left else 1, 0)}
    box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    look: dict[str, Any] = {"ha": "left" if left else "right", "va": "top", "fontsize": style.SMALL, "gid": "peak"}
    text = ax.annotate("", (event, total), (event, 0.97 * ax.get_ylim()[1]), arrowprops=line, bbox=box, **look)
    _fit(text, room, f"peak {style.three_digits(total)} {unit[1]}", composition.maker if composition else None)


def _fit(text: Annotation, room: float, value: str, maker: str | None) -> None:
    """As much of what made the peak as there is room for beside it."""
    from matplotlib.text import Text

    lengths = range(len(maker or ""), 11, -4)
    for wording in (*(f"{value} in {shorten(maker or '', length)}" for length in lengths), value):
        text.set_text(wording)
        if Text.get_window_extent(text).width <= room:  # of the words alone, without the line to the peak
            return


MEMORY_FIGURES = (
    figure_output("memory_breakdown_comparison", "the peak of each method by component", draw_breakdown),
    figure_output("memory_timeline", "live bytes by component over a step", draw_timeline),
)

"""`performance_tradeoff`: peak memory against time, absolute and as multiples of ordinary training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpscope.reports.composition import why_no_composition
from dpscope.reports.figures.labels import label_points
from dpscope.reports.figures.style import SMALL, byte_unit, new_figure, not_drawn, set_title, settle, styled
from dpscope.reports.palette import METHOD_COLOURS, METHOD_MARKERS
from dpscope.reports.tables import Row
from dpscope.reports.words import shorten
from dpscope.units import format_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_NAME = 28  # characters
MARKER = 6.0  # points
REFERENCE = "standard"
CLOSEST = 0.3  # of the largest value: the least that an axis spans


@styled
def draw_tradeoff(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size; None if none of them has both a time and a peak."""
    drawn = [row for row in rows if row.median_ms and row.peak_bytes]
    if not drawn:
        return None
    figure = new_figure(3.1)
    absolute, relative = figure.subplots(1, 2)
    set_title(figure, "Peak memory against time of a training step", rows, _notes(rows, drawn))
    unit, name = byte_unit(max(row.peak_bytes or 0.0 for row in drawn))
    slow = max(row.median_ms or 0.0 for row in drawn) >= 10_000
    absolute.set_xlabel(f"time of a step ({'s' if slow else 'ms'}), median and p10–p90")
    absolute.set_ylabel(f"peak memory ({name})")
    relative.set_xlabel("time (× standard)")
    relative.set_ylabel("peak memory (× standard)")

    second = 1000.0 if slow else 1.0
    spreads = [row.spread_ms or (row.median_ms or 0.0,) * 2 for row in drawn]
    points = [((row.median_ms or 0.0) / second, (row.peak_bytes or 0.0) / unit) for row in drawn]
    _scatter(absolute, points, [(low / second, high / second) for low, high in spreads], _numbers(rows, drawn))
    compared = [row for row in drawn if row.time_ratio is not None and row.memory_ratio is not None]
    ratios = [(row.time_ratio or 0.0, row.memory_ratio or 0.0) for row in compared]
    if ratios:
        for line in (relative.axvline, relative.axhline):
            line(1.0, color="0.6", linewidth=0.6, linestyle=(0, (4, 2)), zorder=0, gid=REFERENCE)
        _scatter(relative, ratios, [(time, time) for time, _ in ratios], _numbers(rows, compared))
    else:
        relative.text(0.5, 0.5, "no standard at this size:\nno ratios", transform=relative.transAxes, ha="center")
        relative.set_axis_off()
    settle(figure)
    _label(absolute, points, spreads, second, [shorten(row.method, LONGEST_NAME) for row in drawn])
    _label(relative, ratios, [(time, time) for time, _ in ratios], 1.0, [_ratio_label(row) for row in compared])
    return figure


def _notes(rows: Sequence[Row], drawn: Sequence[Row]) -> list[str]:
    notes = not_drawn([(row, _why_none(row)) for row in rows if not (row.median_ms and row.peak_bytes)])
    shaky = [row.method for row in drawn if not row.steady]
    return [*notes, f"? step times varied too much for a verdict: {', '.join(shaky)}"] if shaky else notes


def _why_none(row: Row) -> str:
    if not row.result.ok:
        return why_no_composition(row)
    return "no time was measured" if not row.median_ms else "no peak was measured"


def _numbers(rows: Sequence[Row], shown: Sequence[Row]) -> list[int]:
    """A method's place decides its colour and marker, the same in both panels."""
    places = {id(row): place for place, row in enumerate(rows)}
    return [places[id(row)] for row in shown]


def _scatter(
    ax: Axes, points: Sequence[tuple[float, float]], spreads: Sequence[tuple[float, float]], numbers: Sequence[int]
) -> None:
    for (x, y), (low, high), number in zip(points, spreads, numbers, strict=True):
        ax.errorbar(
            x,
            y,
            xerr=[[max(x - low, 0.0)], [max(high - x, 0.0)]],
            marker=METHOD_MARKERS[number % len(METHOD_MARKERS)],
            color=METHOD_COLOURS[number % len(METHOD_COLOURS)],
            markersize=MARKER,
            linewidth=1.0,
            capsize=2,
        )
    ax.set_xlim(*_limits([*(low for low, _ in spreads), *(high for _, high in spreads), *(x for x, _ in points)]))
    ax.set_ylim(*_limits([y for _, y in points]))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Room for labels around the values, and never so close up that noise looks like a difference."""
    low, high = min(values), max(values)
    span = max(high - low, CLOSEST * high)
    middle = (low + high) / 2
    return middle - 0.7 * span, middle + 0.7 * span


def _label(
    ax: Axes,
    points: Sequence[tuple[float, float]],
    spreads: Sequence[tuple[float, float]],
    unit: float,
    texts: Sequence[str],
) -> None:
    from matplotlib.transforms import Bbox

    half = (MARKER / 2 + 1) * ax.figure.dpi / 72
    obstacles = []
    for (x, y), (low, high) in zip(points, spreads, strict=True):
        left, middle = ax.transData.transform((min(low / unit, x), y))
        right, _ = ax.transData.transform((max(high / unit, x), y))
        obstacles.append(Bbox.from_extents(left - half, middle - half, right + half, middle + half))
    obstacles += [line.get_window_extent().padded(1) for line in ax.get_lines() if line.get_gid() == REFERENCE]
    label_points(ax, points, texts, obstacles=obstacles, fontsize=SMALL)


def _ratio_label(row: Row) -> str:
    name = shorten(row.method, LONGEST_NAME)
    return f"{name} {format_ratio(row.time_ratio)}{'' if row.steady else '?'}, {format_ratio(row.memory_ratio)}"

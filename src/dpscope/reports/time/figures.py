"""`performance_tradeoff`: peak memory against time, absolute and as multiples of ordinary training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpscope.reports.doubt import explain, marked
from dpscope.reports.figures import style
from dpscope.reports.figures.labels import Box, label_points
from dpscope.reports.output import figure_output
from dpscope.reports.palette import method_colours, method_markers
from dpscope.reports.tables import Row
from dpscope.reports.words import shorten
from dpscope.units import format_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_LABEL = 28  # characters
MARKER_SIZE = 6.0  # points
MANY_METHODS = 6  # more are named in a legend
REFERENCE = "standard"
CLOSEST = 0.3  # of the largest value: the least that an axis spans


@dataclass(frozen=True)
class TradeoffPoint:
    x: float
    y: float
    spread: tuple[float, ...]  # 10th and 90th percentile of x
    label: str
    colour: str
    marker: str

    @property
    def look(self) -> dict[str, Any]:
        return {"marker": self.marker, "color": self.colour, "markersize": MARKER_SIZE}


@style.styled
def draw_tradeoff(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size; None if none of them has both a time and a peak."""
    drawn = [row for row in rows if row.median_ms and row.peak_bytes]
    if not drawn:
        return None
    many = len(drawn) > MANY_METHODS
    figure = style.new_figure(3.1 + (0.09 * len(drawn) if many else 0.0))
    absolute, relative = figure.subplots(1, 2)
    style.set_title(figure, "Peak memory against time of a training step", style.describe(rows), *_notes(rows, drawn))
    unit, name = style.byte_unit(max(row.peak_bytes or 0.0 for row in drawn))
    slow = max(row.median_ms or 0.0 for row in drawn) >= 10_000
    absolute.set_xlabel(f"time of a step ({'s' if slow else 'ms'}), median and p10–p90")
    absolute.set_ylabel(f"peak memory ({name})")
    relative.set_xlabel("time (× standard)")
    relative.set_ylabel("peak memory (× standard)")

    second = 1000.0 if slow else 1.0
    methods = [row.method for row in rows]
    colours, markers = method_colours(methods), method_markers(methods)
    points, ratios = [], []
    for row in drawn:
        look, label = (colours[row.method], markers[row.method]), shorten(row.method, LONGEST_LABEL)
        time, peak = (row.median_ms or 0.0) / second, (row.peak_bytes or 0.0) / unit
        spread = tuple(edge / second for edge in row.spread_ms or (row.median_ms or 0.0,) * 2)
        points.append(TradeoffPoint(time, peak, spread, marked(label, row.time_doubt), *look))
        if row.time_ratio is not None and row.memory_ratio is not None:
            label = f"{label} {row.time_ratio_shown}, {format_ratio(row.memory_ratio)}"
            ratios.append(TradeoffPoint(row.time_ratio, row.memory_ratio, (row.time_ratio,) * 2, label, *look))
    _scatter(absolute, points)
    if ratios:
        for line in (relative.axvline, relative.axhline):
            line(1.0, color="0.6", linewidth=0.6, linestyle=(0, (4, 2)), zorder=0, gid=REFERENCE)
        _scatter(relative, ratios)
    else:
        relative.text(0.5, 0.5, "no standard at this size:\nno ratios", transform=relative.transAxes, ha="center")
        relative.set_axis_off()
    if many:
        _legend(figure, ratios or points)
    style.settle(figure)
    if not many:
        _label(absolute, points)
        _label(relative, ratios)
    return figure


def _notes(rows: Sequence[Row], drawn: Sequence[Row]) -> list[str]:
    missing = {row: "peak" if row.median_ms else "time" for row in rows if row not in drawn}
    notes = style.not_drawn([(row, row.why_none(f"no {what} was measured")) for row, what in missing.items()])
    doubt = explain(row.ratio_doubt for row in drawn)
    return [*notes, doubt.removesuffix(".")] if doubt else notes


def _scatter(ax: Axes, points: Sequence[TradeoffPoint]) -> None:
    for point in points:
        low, high = point.spread
        spread = [[max(point.x - low, 0.0)], [max(high - point.x, 0.0)]]
        ax.errorbar(point.x, point.y, xerr=spread, linewidth=1.0, capsize=2, **point.look)
    ax.set_xlim(*_limits([edge for point in points for edge in (point.x, *point.spread)]))
    ax.set_ylim(*_limits([point.y for point in points]))


def _legend(figure: Figure, points: Sequence[TradeoffPoint]) -> None:
    """For more methods than can be named beside their markers."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", label=point.label, **point.look) for point in points]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Room for labels around the values, and never so close up that noise looks like a difference."""
    low, high = min(values), max(values)
    span = max(high - low, CLOSEST * high)
    middle = (low + high) / 2
    return max(middle - 0.7 * span, 0.0), middle + 0.7 * span


def _label(ax: Axes, points: Sequence[TradeoffPoint]) -> None:
    """Names beside their markers, off all markers, spreads and the lines of standard."""
    half = (MARKER_SIZE / 2 + 1) * ax.figure.dpi / 72
    lines = [line.get_window_extent().padded(1) for line in ax.get_lines() if line.get_gid() == REFERENCE]
    obstacles: list[Box] = [(line.x0, line.y0, line.x1, line.y1) for line in lines]
    for point in points:
        left, middle = ax.transData.transform((min(point.spread[0], point.x), point.y))
        right, _ = ax.transData.transform((max(point.spread[1], point.x), point.y))
        obstacles.append((left - half, middle - half, right + half, middle + half))
    named = [((point.x, point.y), point.label, point.colour) for point in points]
    label_points(ax, named, obstacles=obstacles, fontsize=style.SMALL)


TRADEOFF_FIGURE = figure_output("performance_tradeoff", "time against memory of each method", draw_tradeoff)

"""`performance_tradeoff`: peak memory against time, absolute and as multiples of ordinary training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.doubt import explain, marked
from dpscope.reports.figures import style
from dpscope.reports.figures.points import Point, box_of, draw_points, name_points
from dpscope.reports.output import figure_output
from dpscope.reports.palette import looks_of
from dpscope.reports.tables import Row
from dpscope.reports.words import shorten
from dpscope.units import format_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_LABEL = 28  # characters
MANY_METHODS = 6  # more are named in a legend
CLOSEST = 0.3  # of the largest value: the least that an axis spans


@style.styled
def draw_tradeoff(rows: Sequence[Row]) -> Figure | None:
    """Return the rows of one size; None if none of them has both a time and a peak."""
    drawn = [row for row in rows if row.median_ms and row.peak_bytes]
    if not drawn:
        return None
    many = len(drawn) > MANY_METHODS
    figure, axes = style.new_panels(2, 2, 0.09 * len(drawn) if many else 0.0, [3.1])
    missing = {row: "peak" if row.median_ms else "time" for row in rows if row not in drawn}
    notes = style.not_drawn([(row, row.why_none(f"no {what} was measured")) for row, what in missing.items()])
    notes.append(explain(row.ratio_doubt for row in drawn).removesuffix("."))
    style.set_title(figure, "Peak memory against time of a training step", style.describe(rows), *notes)
    unit, name = style.byte_unit(max(row.peak_bytes or 0.0 for row in drawn))
    second, clock = (1e3, "s") if max(row.median_ms or 0.0 for row in drawn) >= 10_000 else (1.0, "ms")
    points, ratios = _points(drawn, second, unit)
    _scatter(axes[0], points, f"step time ({clock}), median and p10–p90", f"peak memory ({name})")
    for line in (axes[1].axvline, axes[1].axhline) if ratios else ():
        line(1.0, color="0.6", linewidth=0.6, linestyle=(0, (4, 2)), zorder=0, gid="standard")
    _scatter(axes[1], ratios, "time (× standard)", "peak memory (× standard)")
    if many:
        _legend(figure, ratios or points)
    style.settle(figure)
    for ax, named in zip(axes, (points, ratios), strict=True) if not many else ():
        name_points(ax, named, [box_of(line, pad=1) for line in ax.get_lines() if line.get_gid() == "standard"])
    return figure


def _points(rows: Sequence[Row], second: float, unit: float) -> tuple[list[Point], list[Point]]:
    """Return points, absolute and as multiples of standard if it has both figures."""
    points, ratios = [], []
    for row in rows:
        name = shorten(row.method, LONGEST_LABEL)
        look: dict[str, Any] = {**looks_of([row])[row.method]}
        time, peak = row.median_ms or 0.0, row.peak_bytes or 0.0
        low, high = row.spread_ms or (time, time)
        label, spread = marked(name, row.time_doubt), (low / second, high / second)
        points.append(Point(x=time / second, y=peak / unit, label=label, spread=spread, **look))
        if row.time_ratio is not None and row.memory_ratio is not None:
            label = f"{name} {row.time_ratio_shown}, {format_ratio(row.memory_ratio)}"
            ratios.append(Point(x=row.time_ratio, y=row.memory_ratio, label=label, **look))
    return points, ratios


def _scatter(ax: Axes, points: Sequence[Point], x: str, y: str) -> None:
    if not points:
        ax.text(0.5, 0.5, "no standard at this size:\nno ratios", transform=ax.transAxes, ha="center")
        ax.set_axis_off()
        return
    draw_points(ax, points)
    across = [edge for point in points for edge in (point.x, *(point.spread or ()))]
    ax.set(xlabel=x, ylabel=y, xlim=_limits(across), ylim=_limits([point.y for point in points]))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits with room for labels, and never so close that noise looks like a difference."""
    low, high = min(values), max(values)
    middle, span = (low + high) / 2, max(high - low, CLOSEST * high)
    return max(middle - 0.7 * span, 0.0), middle + 0.7 * span


def _legend(figure: Figure, points: Sequence[Point]) -> None:
    """Draw a legend, for more methods than can be named beside their markers."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", label=point.label, **point.look) for point in points]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


TRADEOFF_FIGURE = figure_output("performance_tradeoff", "time against memory of each method", draw_tradeoff)

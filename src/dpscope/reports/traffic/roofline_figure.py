"""`roofline`: how fast a step computes against how much it computes for each DRAM byte, below the machine's own roofs.

Both axes are logarithmic. The sloping roof is the measured DRAM bandwidth, the level ones the measured rates of matrix
products. Whole steps combine counted bytes and operations with the unprofiled time; kernels carry their own times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.labels import Box, label_points
from dpscope.reports.figures.style import SMALL, settle, styled
from dpscope.reports.page.looks import looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic.panels import make_panels, set_heading
from dpscope.reports.traffic.roofline import Point, Roofs, point_notes, rooflines
from dpscope.reports.words import shorten
from dpscope.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

Looks = dict[str, dict[str, str]]  # method -> colour and marker

MARKER, SMALL_MARKER = 6.5, 3.0  # points
NAMED_KERNELS = 4  # of each panel
LONGEST_NAME = 18  # characters of a kernel's
SLOPE_BOXES = 32  # small enough that little beside the line is kept free
SPAN = 100.0  # the least that an axis spans
ROOM = 3.0  # an axis goes this factor beyond its points


@styled
def draw_roofline(rows: Sequence[Row]) -> Figure | None:
    """Every size in a panel of its own, on one scale; None if no row has bytes, operations and a time."""
    found = rooflines(rows)
    if not found:
        return None
    looks = looks_of(rows)
    groups = [each.traffics for each in found]
    figure, axes = make_panels(groups, columns=2, height=2.9)
    every = [point for each in found for point in each.points]
    for ax, each in zip(axes, found, strict=True):
        _set_axes(ax, each.roofs, every)
        for point in each.points:
            _draw_point(ax, point, looks)
    set_heading(figure, "Roofline of one training step", groups, point_notes(found))
    settle(figure)
    for ax, each in zip(axes, found, strict=True):
        _label(ax, each.points, looks, _draw_roofs(ax, each.roofs))
    return figure


def _label_of(point: Point) -> str:
    if point.kernel:
        return shorten(point.name, LONGEST_NAME)
    return shorten(point.name, 24) + (" (estimate)" if point.estimated else "")


def _set_axes(ax: Axes, roofs: Roofs, points: Sequence[Point]) -> None:
    from matplotlib.ticker import NullFormatter

    levels = list(roofs.levels.values())
    knee = [max(levels) / roofs.bandwidth] if levels and roofs.bandwidth else []
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP / DRAM byte)", ylabel="FLOP / s")
    ax.set_xlim(_limits([*(point.x for point in points), *knee]))
    ax.set_ylim(_limits([*(point.y for point in points), *levels]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.grid(which="major", color="0.92", linewidth=0.5, zorder=0)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Room around the values, and two powers of ten at least: an axis is read by them."""
    low, high = min(values) / ROOM, max(values) * ROOM
    widen = max(1.0, SPAN / (high / low)) ** 0.5
    return low / widen, high * widen


def _draw_point(ax: Axes, point: Point, looks: Looks) -> None:
    colour = looks[point.method]["colour"]
    ax.plot(
        point.x,
        point.y,
        marker=looks[point.method]["marker"],
        markersize=SMALL_MARKER if point.kernel else MARKER,
        markerfacecolor="white" if point.hollow else colour,
        markeredgecolor=colour,
        linestyle="none",
        alpha=0.7 if point.kernel else 1.0,
        zorder=2 if point.kernel else 3,
    )


def _draw_roofs(ax: Axes, roofs: Roofs) -> list[Box]:
    """The measured ceilings with their values; the places they take, in pixels."""
    bandwidth = roofs.bandwidth
    left, right = ax.get_xlim()
    line: dict[str, Any] = {"color": "0.35", "linewidth": 0.9, "zorder": 1, "scalex": False, "scaley": False}
    text: dict[str, Any] = {"fontsize": SMALL, "color": "0.25"}
    highest = max(roofs.levels.values(), default=None)
    taken: list[Box] = []
    for name, rate in roofs.levels.items():
        start = max(left, rate / bandwidth) if bandwidth else left
        ax.plot([start, right], [rate, rate], linestyle="-" if rate == highest else "--", **line)
        label = f"{name} {format_rate(rate, 'FLOP')}"
        written = ax.annotate(
            label, (right, rate), (-2, 2), textcoords="offset points", ha="right", va="bottom", **text
        )
        taken += [_box(written), *_along(ax, (start, rate), (right, rate))]
    if bandwidth:
        end = min(right, highest / bandwidth) if highest else right
        ax.plot([left, end], [bandwidth * left, bandwidth * end], **line)
        taken += _along(ax, (left, bandwidth * left), (end, bandwidth * end))
        taken.append(_write_along_slope(ax, bandwidth, end, text))
    return taken


def _write_along_slope(ax: Axes, bandwidth: float, end: float, text: dict[str, Any]) -> Box:
    """The bandwidth, along its line, where that enters the panel."""
    left, _ = ax.get_xlim()
    low, _ = ax.get_ylim()
    start = max(left, low / bandwidth) * 1.15
    (x0, y0), (x1, y1) = ax.transData.transform([(start, bandwidth * start), (end, bandwidth * end)])
    written = ax.annotate(
        f"DRAM {format_rate(bandwidth)}",
        (start, bandwidth * start),
        (0, 2),
        textcoords="offset points",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        ha="left",
        va="bottom",
        **text,
    )
    return _box(written)


def _box(written: Annotation) -> Box:
    extent = written.get_window_extent()
    return extent.x0, extent.y0, extent.x1, extent.y1


def _along(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Boxes over a straight line, one if it is level: what labels keep away from."""
    (x0, y0), (x1, y1) = ax.transData.transform([start, end])
    pieces = 1 if y0 == y1 else SLOPE_BOXES
    ends = [(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces) for i in range(pieces + 1)]
    return [
        (left - 2, min(low, high) - 2, right + 2, max(low, high) + 2) for (left, low), (right, high) in pairwise(ends)
    ]


def _label(ax: Axes, points: Sequence[Point], looks: Looks, roofs: Sequence[Box]) -> None:
    """Every step, and the largest kernels, each name once."""
    obstacles = list(roofs)
    for point in points:
        half = ((SMALL_MARKER if point.kernel else MARKER) / 2 + 1) * ax.figure.dpi / 72
        x, y = ax.transData.transform((point.x, point.y))
        obstacles.append((x - half, y - half, x + half, y + half))
    kernels = list({_label_of(point): point for point in points if point.kernel}.values())[:NAMED_KERNELS]
    named = [*(point for point in points if not point.kernel), *kernels]
    label_points(
        ax,
        [(point.x, point.y) for point in named],
        [_label_of(point) for point in named],
        [looks[point.method]["colour"] for point in named],
        obstacles=obstacles,
        fontsize=SMALL,
    )

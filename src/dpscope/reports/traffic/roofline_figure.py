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
from dpscope.reports.output import figure_output
from dpscope.reports.page.looks import looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic.figures import make_panels, set_heading
from dpscope.reports.traffic.roofline import RooflinePoint, Roofs, point_notes, rooflines
from dpscope.reports.words import shorten
from dpscope.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP_MARKER, KERNEL_MARKER = 6.5, 3.0  # points
NAMED_KERNELS = 4  # of each panel
LONGEST_POINT, LONGEST_KERNEL = 24, 18  # characters
SLOPE_BOXES = 32  # small enough that little beside the line is kept free
SPAN = 100.0  # the least that an axis spans
ROOM = 3.0  # an axis goes this factor beyond its points

Looks = dict[str, dict[str, str]]  # method -> colour and marker


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
            _draw_point(ax, point, **looks[point.method])
    set_heading(figure, "Roofline of one training step", groups, point_notes(found))
    settle(figure)
    for ax, each in zip(axes, found, strict=True):
        _label(ax, each.points, looks, _draw_roofs(ax, each.roofs))
    return figure


def _set_axes(ax: Axes, roofs: Roofs, points: Sequence[RooflinePoint]) -> None:
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


def _draw_point(ax: Axes, point: RooflinePoint, *, colour: str, marker: str) -> None:
    size, alpha, zorder = (KERNEL_MARKER, 0.7, 2) if point.kernel else (STEP_MARKER, 1.0, 3)
    look: dict[str, Any] = {"marker": marker, "markersize": size, "linestyle": "none", "alpha": alpha, "zorder": zorder}
    fill = "white" if point.hollow else colour
    ax.plot(point.x, point.y, markerfacecolor=fill, markeredgecolor=colour, **look)


def _draw_roofs(ax: Axes, roofs: Roofs) -> list[Box]:
    """The measured ceilings with their values; the places they take, in pixels."""
    bandwidth = roofs.bandwidth
    (left, right), (low, _) = ax.get_xlim(), ax.get_ylim()
    highest = max(roofs.levels.values(), default=None)
    taken: list[Box] = []
    for name, rate in roofs.levels.items():
        start = max(left, rate / bandwidth) if bandwidth else left
        taken += _draw_line(ax, (start, rate), (right, rate), "-" if rate == highest else "--")
        taken.append(_write(ax, f"{name} {format_rate(rate, 'FLOP')}", (right, rate), (-2, 2), ha="right"))
    if bandwidth:
        end = min(right, highest / bandwidth) if highest else right
        taken += _draw_line(ax, (left, bandwidth * left), (end, bandwidth * end), "-")
        start = max(left, low / bandwidth) * 1.15  # where the line enters the panel
        (x0, y0), (x1, y1) = ax.transData.transform([(start, bandwidth * start), (end, bandwidth * end)])
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        along: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "ha": "left"}
        taken.append(_write(ax, f"DRAM {format_rate(bandwidth)}", (start, bandwidth * start), (0, 2), **along))
    return taken


def _draw_line(ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> list[Box]:
    """A straight line; boxes over it, one if it is level: what labels keep away from."""
    line: dict[str, Any] = {"color": "0.35", "linewidth": 0.9, "zorder": 1, "scalex": False, "scaley": False}
    ax.plot(*zip(start, end, strict=True), linestyle=style, **line)
    (x0, y0), (x1, y1) = ax.transData.transform([start, end])
    pieces = 1 if y0 == y1 else SLOPE_BOXES
    ends = [(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces) for i in range(pieces + 1)]
    return [(a - 2, min(low, high) - 2, b + 2, max(low, high) + 2) for (a, low), (b, high) in pairwise(ends)]


def _write(ax: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> Box:
    look: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "fontsize": SMALL, "color": "0.25"}
    extent = ax.annotate(text, point, offset, **look, **style).get_window_extent()
    return extent.x0, extent.y0, extent.x1, extent.y1


def _label(ax: Axes, points: Sequence[RooflinePoint], looks: Looks, roofs: Sequence[Box]) -> None:
    """Every step, and the largest kernels, each name once."""
    obstacles = list(roofs)
    for point in points:
        half = ((KERNEL_MARKER if point.kernel else STEP_MARKER) / 2 + 1) * ax.figure.dpi / 72
        x, y = ax.transData.transform((point.x, point.y))
        obstacles.append((x - half, y - half, x + half, y + half))
    kernels = {_name(point): point for point in points if point.kernel}
    named = [*(point for point in points if not point.kernel), *list(kernels.values())[:NAMED_KERNELS]]
    places, names = [(point.x, point.y) for point in named], [_name(point) for point in named]
    colours = [looks[point.method]["colour"] for point in named]
    label_points(ax, places, names, colours, obstacles=obstacles, fontsize=SMALL)


def _name(point: RooflinePoint) -> str:
    if point.kernel:
        return shorten(point.name, LONGEST_KERNEL)
    return shorten(point.name, LONGEST_POINT) + (" (estimate)" if point.estimated else "")


ROOFLINE_HOLDS = "operations a byte against what the GPU can do"
ROOFLINE = figure_output("roofline", ROOFLINE_HOLDS, draw_roofline, instrument="ncu", sizes_apart=False)

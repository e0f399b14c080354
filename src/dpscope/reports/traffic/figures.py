"""The figures of traffic have a panel for each size, since what grows with the size is the question.

`traffic_bytes`: DRAM bytes, read and written or family by family, a bar a method. `roofline`: how fast a step computes
against how much it computes for each DRAM byte, below the machine's own roofs; both axes are logarithmic, the sloping
roof is the measured DRAM bandwidth, the level ones the measured rates of matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.labels import Box, label_points
from dpscope.reports.figures.style import FONT, SMALL, new_figure, patch_legend, set_title, settle, styled
from dpscope.reports.output import figure_output
from dpscope.reports.palette import looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import Part, Traffic, TrafficGroups, by_size, direction_parts, family_parts
from dpscope.reports.traffic.roofline import RooflinePoint, Roofs, point_notes, rooflines
from dpscope.reports.words import shorten
from dpscope.units import MISSING, format_rate, format_ratio, format_traffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PANELS_ACROSS = 4  # panels side by side
MOST_LETTERS = 60  # of method names side by side: more are written aslant
WIDEST_SLOTS = 7  # bars that a lone panel has room for: fewer do not grow fat
TITLE_HEIGHT = 0.55  # inches
STEP_MARKER, KERNEL_MARKER = 6.5, 3.0  # points
NAMED_KERNELS = 4  # of each panel
LONGEST_POINT, LONGEST_KERNEL = 24, 18  # characters
SLOPE_BOXES = 32  # small enough that little beside the line is kept free
SPAN = 100.0  # the least that an axis spans
ROOM = 3.0  # an axis goes this factor beyond its points

Looks = dict[str, dict[str, str]]  # method -> colour and marker


def make_panels(groups: TrafficGroups, *, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of `height` inches for each group of one size."""
    columns = min(columns, len(groups))
    lines = -(-len(groups) // columns)
    figure = new_figure(TITLE_HEIGHT + lines * height)
    axes = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    for ax, group in zip(axes, groups if len(groups) > 1 else (), strict=False):
        ax.set_title(group[0].row.size, fontsize=FONT if columns < 4 else SMALL)
    return figure, axes[: len(groups)]


def set_heading(figure: Figure, heading: str, groups: TrafficGroups, note: str) -> None:
    """What is shown, of what and on what; an estimate is called one before anything else."""
    traffics = [traffic for group in groups for traffic in group]
    if all(traffic.estimated for traffic in traffics):
        heading += ": an ESTIMATE from tensor sizes, not measured"
    rows = [traffic.row for traffic in traffics]
    what = ["/".join(dict.fromkeys(row.cell(name) for row in rows)) for name in ("model", "dtype", "optimizer")]
    what += [rows[0].size] if len(groups) == 1 else []
    machines = [row.first.environment for row in rows if row.first.environment]
    where = dict.fromkeys(str(machine.get("gpu") or machine.get("cpu")) for machine in machines)
    set_title(figure, heading, "; ".join(filter(None, (", ".join(what), ", ".join(where)))), note)


@styled
def draw_traffic_bytes(rows: Sequence[Row]) -> Figure | None:
    """Every size in a panel of its own, on one scale; None if no row has bytes."""
    groups = by_size(rows, lambda traffic: traffic.dram_bytes)
    if not groups:
        return None
    traffics = [traffic for group in groups for traffic in group]
    find_parts = family_parts if all(traffic.by_family for traffic in traffics) else direction_parts
    largest = max(traffic.dram_bytes or 0 for traffic in traffics)
    unit, name = _unit(largest)
    figure, axes = make_panels(groups, columns=PANELS_ACROSS, height=2.5)
    for number, (ax, group) in enumerate(zip(axes, groups, strict=True)):
        _draw_bars(ax, group, find_parts(group), unit, beside=min(PANELS_ACROSS, len(groups)))
        ax.set_ylim(0, 1.18 * largest / unit)
        if number % PANELS_ACROSS == 0:
            ax.set_ylabel(f"DRAM bytes of a step ({name})")
    mixed = len({traffic.source for traffic in traffics}) > 1
    pale = "; ≈ and pale: an estimate from tensor sizes, not measured" if mixed else ""
    set_heading(figure, "DRAM bytes that one training step moves", groups, f"× standard above each bar{pale}")
    looks = {}
    for part in find_parts(traffics):  # each as the first bar that has it shows it
        first = next((t for t, count in zip(traffics, part.counts, strict=True) if count), traffics[0])
        looks[part.label] = _look(part, first)
    patch_legend(figure, looks, 5, handlelength=1.6)
    return figure


def _draw_bars(ax: Axes, group: Sequence[Traffic], parts: Sequence[Part], unit: float, *, beside: int) -> None:
    for place, traffic in enumerate(group):
        bottom = 0.0
        for part in parts:
            if count := part.counts[place]:
                ax.bar(place, count / unit, 0.72, bottom=bottom, **_look(part, traffic))
                bottom += count / unit
        text = format_ratio(traffic.ratio)
        told = "" if text == MISSING else traffic.show(text)
        ax.annotate(told, (place, bottom), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL)
    ax.set_xticks(range(len(group)), [shorten(traffic.method, 12) for traffic in group])
    if beside * sum(len(traffic.method) for traffic in group) > MOST_LETTERS:
        ax.tick_params(axis="x", labelrotation=30)
    ax.tick_params(axis="x", length=0)
    middle = (len(group) - 1) / 2
    half = max(len(group), WIDEST_SLOTS if beside == 1 else 0) / 2
    ax.set_xlim(middle - half, middle + half)


def _look(part: Part, traffic: Traffic) -> dict[str, Any]:
    pale: dict[str, Any] = {"alpha": 0.55} if traffic.estimated else {}
    if part.colour is None:
        return {"facecolor": "white", "edgecolor": "0.6", "linewidth": 0.4, "hatch": "....", **pale}
    hatch = "//////" if part.private or part.label == "written" else None
    return {"facecolor": part.colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4, **pale}


def _unit(largest: float) -> tuple[float, str]:
    """The decimal unit of an axis, and its size in bytes."""
    unit = 10.0 ** max(0, min(12, (len(str(int(largest))) - 1) // 3 * 3))
    return unit, format_traffic(unit).rpartition(" ")[2]


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
    labels = [((point.x, point.y), _name(point), looks[point.method]["colour"]) for point in named]
    label_points(ax, labels, obstacles=obstacles, fontsize=SMALL)


def _name(point: RooflinePoint) -> str:
    if point.kernel:
        return shorten(point.name, LONGEST_KERNEL)
    return shorten(point.name, LONGEST_POINT) + (" (estimate)" if point.estimated else "")


_of_all_sizes = partial(figure_output, instrument="ncu", sizes_apart=False)
TRAFFIC_BYTES = _of_all_sizes("traffic_bytes", "DRAM bytes of a step by family of kernels", draw_traffic_bytes)
ROOFLINE = _of_all_sizes("roofline", "operations a byte against what the GPU can do", draw_roofline)

"""Figures of traffic, a panel for each size: DRAM bytes by method, and the roofline on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.bars import BarPanel, draw_bars, filled
from dpscope.reports.figures.points import Box, Pixel, Point, box_of, draw_points, name_points
from dpscope.reports.figures.style import SMALL, describe, new_panels, set_title, settle, styled
from dpscope.reports.output import figure_output
from dpscope.reports.tables import Row
from dpscope.reports.traffic.charts import roofline, traffic
from dpscope.reports.traffic.data import marked_estimate, traffic_of
from dpscope.reports.words import shorten
from dpscope.units import format_rate, format_ratio, format_traffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_ACROSS = 2
STEP_MARKER, KERNEL_MARKER = 6.5, 3.0  # points
NAMED_KERNELS = 4  # of each panel
LONGEST_POINT, LONGEST_KERNEL = 24, 18  # characters
SLOPE_BOXES = 32  # small enough that little beside the line is kept free
SPAN = 100.0  # the least that an axis spans
ROOM = 3.0  # an axis goes this factor beyond its points


def _heading(what: str, rows: Sequence[Row], estimated: Iterable[bool], note: str) -> list[str]:
    """Return the lines above a figure: the quantity, marked if it is an estimate, the rows, and a note."""
    told = f"{what}: an ESTIMATE from tensor sizes, not measured" if all(estimated) else what
    return [told, describe([row for row in rows if traffic_of(row)]), note]


def draw_traffic_bytes(rows: Sequence[Row]) -> Figure | None:
    """Return every size in a panel of its own, on one scale; families of kernels where every bar has them."""
    chart = traffic(rows)
    if chart is None:
        return None
    views = [view.data for view in chart.views]
    bars = [bar for view in views for bar in view["bars"]]
    stacks = [{part["stack"] for part in view["parts"]} for view in views]
    stack = "family" if all("family" in each for each in stacks) else "direction"
    parts = [{part["label"]: part for part in view["parts"] if part["stack"] == stack} for view in views]
    # The largest power of a thousand below the longest bar.
    unit = 10.0 ** max(0, min(12, (len(str(int(max(bar["bytes"] for bar in bars)))) - 1) // 3 * 3))
    panels = [
        BarPanel(
            names=[bar["method"] for bar in view["bars"]],
            parts={label: [count and count / unit for count in part["bytes"]] for label, part in own.items()},
            ends=[
                "" if b["ratio"] is None else marked_estimate(format_ratio(b["ratio"]), b["estimated"])
                for b in view["bars"]
            ],
            axis=f"DRAM bytes of a step ({format_traffic(unit).rpartition(' ')[2]})",
            title=size if len(views) > 1 else "",
            pale=[place for place, bar in enumerate(view["bars"]) if bar["estimated"]],
        )
        for size, view, own in zip((view.size for view in chart.views), views, parts, strict=True)
    ]
    looks = {
        label: filled(part["colour"], part["private"] or label == "written")
        for own in parts
        for label, part in own.items()
    }
    estimated = [bar["estimated"] for bar in bars]
    mixed = any(estimated) and not all(estimated)
    note = f"× standard behind each bar{'; ≈ and pale: an estimate from tensor sizes, not measured' if mixed else ''}"
    title = _heading("DRAM bytes that one training step moves", rows, estimated, note)
    return draw_bars(title, panels, looks, columns=PANELS_ACROSS)


@styled
def draw_roofline(rows: Sequence[Row]) -> Figure | None:
    """Return every size in a panel of its own, on one scale; None if no row has bytes, operations and a time."""
    chart = roofline(rows)
    if chart is None:
        return None
    views = [view.data for view in chart.views]
    columns = min(PANELS_ACROSS, len(views))
    figure, axes = new_panels(len(views), columns, 0.55, [2.9] * -(-len(views) // columns))
    every = [point for view in views for point in view["points"]]
    for ax, view, of in zip(axes, views, chart.views, strict=True):
        ax.set_title(of.size if len(views) > 1 else "", loc="left", fontweight="bold")
        _set_axes(ax, view["roofs"], every)
        draw_points(ax, _points(view["points"]))
    steps = [point["estimated"] for point in every if not point["kernel"]]
    note = chart.how.partition(".")[0]  # what the markers mean
    set_title(figure, *_heading("Roofline of one training step", rows, steps, note))
    settle(figure)
    for ax, view in zip(axes, views, strict=True):
        name_points(ax, _points(view["points"]), _draw_roofs(ax, view["roofs"]))
    return figure


def _points(drawn: Sequence[dict[str, Any]]) -> list[Point]:
    """Name every step and the largest kernels, each name once."""
    points, kernels = [], set[str]()
    for each in drawn:
        label = shorten(each["name"], LONGEST_POINT) + (" (estimate)" if each["estimated"] else "")
        if each["kernel"]:
            name = shorten(each["name"], LONGEST_KERNEL)
            label = name if name not in kernels and len(kernels) < NAMED_KERNELS else ""
            kernels.add(name)
        look = {name: each[name] for name in ("x", "y", "colour", "marker", "hollow")}
        points.append(Point(label=label, size=KERNEL_MARKER if each["kernel"] else STEP_MARKER, **look))
    return points


def _set_axes(ax: Axes, roofs: dict[str, Any], points: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import NullFormatter

    bandwidth, levels = roofs["bytes_per_second"], list(roofs["levels"].values())
    knee = [max(levels) / bandwidth] if levels and bandwidth else []
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP / DRAM byte)", ylabel="FLOP / s")
    ax.set_xlim(_limits([*(point["x"] for point in points), *knee]))
    ax.set_ylim(_limits([*(point["y"] for point in points), *levels]))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.grid(which="major", color="0.92", linewidth=0.5, zorder=0)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits with room around the values that span at least two powers of ten."""
    low, high = min(values) / ROOM, max(values) * ROOM
    widen = max(1.0, SPAN / (high / low)) ** 0.5
    return low / widen, high * widen


def _draw_roofs(ax: Axes, roofs: dict[str, Any]) -> list[Box]:
    """Draw the measured ceilings with their values; return the places they take, in pixels."""
    bandwidth = roofs["bytes_per_second"]
    (left, right), (low, _) = ax.get_xlim(), ax.get_ylim()
    highest = max(roofs["levels"].values(), default=None)
    taken: list[Box] = []
    for name, rate in roofs["levels"].items():
        start = max(left, rate / bandwidth) if bandwidth else left
        taken += _draw_line(ax, (start, rate), (right, rate), "-" if rate == highest else "--")
        taken.append(_write(ax, f"{name} {format_rate(rate, 'FLOP')}", (right, rate), (-2, 2), ha="right"))
    if bandwidth:
        end = min(right, highest / bandwidth) if highest else right
        taken += _draw_line(ax, (left, bandwidth * left), (end, bandwidth * end), "-")
        start = max(left, low / bandwidth) * 1.15  # where the line enters the panel
        (x0, y0), (x1, y1) = ax.transData.transform([(start, bandwidth * start), (end, bandwidth * end)])
        along: dict[str, Any] = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
        taken.append(_write(ax, f"DRAM {format_rate(bandwidth)}", (start, bandwidth * start), (0, 2), **along))
    return taken


def _draw_line(ax: Axes, start: Pixel, end: Pixel, style: str) -> list[Box]:
    """Draw a straight line; return the boxes that labels keep away from."""
    line: dict[str, Any] = {"color": "0.35", "linewidth": 0.9, "zorder": 1, "scalex": False, "scaley": False}
    ax.plot(*zip(start, end, strict=True), linestyle=style, **line)
    (x0, y0), (x1, y1) = ax.transData.transform([start, end])
    pieces = 1 if y0 == y1 else SLOPE_BOXES
    ends = [(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces) for i in range(pieces + 1)]
    return [(a - 2, min(low, high) - 2, b + 2, max(low, high) + 2) for (a, low), (b, high) in pairwise(ends)]


def _write(ax: Axes, text: str, point: Pixel, offset: Pixel, **style: Any) -> Box:
    look: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "fontsize": SMALL, "color": "0.25"}
    return box_of(ax.annotate(text, point, offset, **look, **style))


_of_all_sizes = partial(figure_output, instrument="ncu", sizes_apart=False)
TRAFFIC_BYTES = _of_all_sizes("traffic_bytes", "DRAM bytes of a step by family of kernels", draw_traffic_bytes)
ROOFLINE = _of_all_sizes("roofline", "operations a byte against what the GPU can do", draw_roofline)

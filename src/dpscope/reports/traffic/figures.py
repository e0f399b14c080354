"""DRAM bytes of a step and the roofline, as charts of the page and as figures: a view or a panel for each size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dpscope.reports import drawing
from dpscope.reports.looks import DIRECTION_COLOURS, FAMILY_COLOURS, PRIVATE_FAMILIES, is_dark, looks_of, shorten
from dpscope.reports.output import figure_output
from dpscope.reports.page.chart import Chart, Table, View, chart_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic import data
from dpscope.reports.traffic.data import marked_estimate, traffic_of
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED, READ, WRITE, moved
from dpscope.units import format_rate, format_ratio, format_traffic
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.phases import FAMILIES, FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DRAWN_KERNELS = 6  # of each method
HOW_BYTES = {
    MEASURED: (
        "Measured: bytes between DRAM and L2 in one step, counted by the GPU under Nsight Compute. It does not see "
        "what stays in the caches."
    ),
    ESTIMATE: (
        f"{data.APPROXIMATELY} estimate: bytes of every operator's tensors in one step, computed from their sizes, not "
        "measured. It does not see caches, which keep part of this from DRAM, nor what an operator does inside."
    ),
}


def traffic(rows: Sequence[Row]) -> Chart | None:
    groups = data.by_size(rows, lambda each: each.dram_bytes)
    every = [each for group in groups for each in group]
    return chart_of(
        map(_view, groups),
        key="traffic",
        title=f"DRAM bytes of a step{_estimate_in_title(every)}",
        nav_label="DRAM bytes",
        how=" ".join(text for source, text in HOW_BYTES.items() if any(each.source == source for each in every)),
    )


def _estimate_in_title(traffics: Sequence[data.Traffic]) -> str:
    """Mark an estimate in the title, so that no reader takes it for a measurement."""
    estimated = [each.estimated for each in traffics]
    return f" ({'' if all(estimated) else 'partly '}{data.APPROXIMATELY} estimate)" if any(estimated) else ""


def _view(group: Sequence[data.Traffic]) -> View:
    counts = {family: [each.family_bytes.get(family) for each in group] for family in (*FAMILIES, data.UNSEEN)}
    families = _parts("family", {family: own for family, own in counts.items() if any(own)})
    moved = {"read": [each.figure(READ) for each in group], "written": [each.figure(WRITE) for each in group]}
    # Stacks of bars: families where every method of the size has kernel rows, and the two directions.
    drawn = families if all(each.by_family for each in group) else []
    columns = ("method", "source", READ, WRITE, "dram_bytes", "ratio_to_standard", "kernels_source")
    lines = []
    for place, each in enumerate(group):
        figures = (each.figure(READ), each.figure(WRITE), each.dram_bytes, each.ratio)
        kernels = (each.kernels.source if each.kernels else None, *(part["bytes"][place] for part in families))
        lines.append((each.method, each.source, *figures, *kernels))
    told = []
    for each in group:
        ratio = "" if each.ratio is None or each.method == STANDARD else f" ({each.show(format_ratio(each.ratio))})"
        told.append(f"{each.show(format_traffic(each.dram_bytes))}{ratio} with {each.method}")
    estimates = [each.estimated for each in group]
    verb = f"{data.APPROXIMATELY} estimate: a step has to move" if all(estimates) else "A step moves"
    partly = f" {data.APPROXIMATELY}: an estimate." if any(estimates) and not all(estimates) else ""
    return View(
        size=group[0].row.size,
        says=f"{verb} {', '.join(told)}.{partly}",
        data={"bars": [_bar(each) for each in group], "parts": [*drawn, *_parts("direction", moved)]},
        table=Table(columns=(*columns, *(f"{part['label']} (bytes)" for part in families)), rows=lines),
    )


def _parts(stack: str, counts: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """Return the segments of the bars: bytes of each bar, and how they look; blank without a colour."""
    parts = []
    for name, own in counts.items():
        colour = {**FAMILY_COLOURS, **DIRECTION_COLOURS}.get(name)
        look = {"colour": colour, "dark": colour is not None and is_dark(colour), "private": name in PRIVATE_FAMILIES}
        parts.append({"stack": stack, "label": FAMILY_LABELS.get(name, name), **look, "bytes": own})
    return parts


def _bar(each: data.Traffic) -> dict[str, Any]:
    moved = {"bytes": each.dram_bytes, "read_bytes": each.figure(READ), "written_bytes": each.figure(WRITE)}
    item = {"per_item_bytes": each.bytes_per_item, "item": each.items[1]}
    rate = {"bandwidth": each.bandwidth, "bandwidth_fraction": each.bandwidth_fraction}
    return {"method": each.method, "estimated": each.estimated, **moved, "ratio": each.ratio, **item, **rate}


def roofline(rows: Sequence[Row]) -> Chart | None:
    """Return operations a second against operations a DRAM byte; None if no row has bytes, operations and a time.

    Whole steps combine bytes and operations with the unprofiled time; kernels carry their own times.
    """
    groups = data.by_size(rows, lambda traffic: traffic.intensity and traffic.flop_rate)
    every = [traffic for group in groups for traffic in group]
    views = [_roofline_view(group, looks_of(rows)) for group in groups]
    measured = dict.fromkeys(how for each in every if (how := each.ceilings.get("how")))
    roofs = f" Roofs as measured on this machine: {'; '.join(measured)}." if measured else ""
    return chart_of(
        views,
        key="roofline",
        title=f"Roofline{_estimate_in_title(every)}",
        nav_label="Roofline",
        how=f"{_point_notes(every, views)}.{roofs} It does not see caches: only DRAM bytes count.",
    )


def _roofline_view(group: Sequence[data.Traffic], looks: dict[str, dict[str, str]]) -> View:
    steps = [
        _point(t.intensity, t.flop_rate, t.method, t.method, hollow=t.flops_estimated, estimated=t.estimated)
        for t in group
    ]
    points = [{**point, **looks[point["method"]]} for point in (*steps, *_kernel_points(group))]
    source = {True: ESTIMATE, False: MEASURED}
    return View(
        size=group[0].row.size,
        says=_roofline_says(group),
        data={"roofs": _roofs_over(group[0]), "points": points},
        table=Table(
            columns=("point", "method", "flops_per_byte", "flops_per_second", "operations", "bytes"),
            rows=[
                (p["name"], p["method"], p["x"], p["y"], source[p["hollow"]], source[p["estimated"]]) for p in points
            ],
        ),
    )


def _point(x: float | None, y: float | None, name: str, method: str, **kind: bool) -> dict[str, Any]:
    """Return a point: FLOP per byte, FLOP per second; `hollow`: estimated operations; `estimated`: estimated bytes."""
    kinds = {"hollow": False, "estimated": False, "kernel": False, **kind}
    return {"x": x, "y": y, "name": name, "method": method, **kinds}


def _kernel_points(group: Sequence[data.Traffic]) -> list[dict[str, Any]]:
    """Return the measured kernels with operations that move the most bytes."""
    found = []
    for traffic in group:
        kernels = [] if traffic.kernels is None or traffic.kernels.estimated else traffic.kernels.rows
        counted = [
            (count, _point(flops / count, flops / (time / 1e9), kernel["name"], traffic.method, kernel=True))
            for kernel in kernels
            if (count := moved(kernel)) and (flops := kernel.get("flops")) and (time := kernel.get("time_ns"))
        ]
        found += sorted(counted, key=lambda each: -each[0])[:DRAWN_KERNELS]
    return [point for _, point in sorted(found, key=lambda pair: -pair[0])]


def _roofs_over(traffic: data.Traffic) -> dict[str, Any]:
    """Return the measured ceilings: DRAM bytes a second, FLOP a second of matrix products."""
    found = traffic.ceilings
    levels = {"tensor cores": found.get("tensor_flops_per_second"), "FP32": found.get("fp32_flops_per_second")}
    known = {label: rate for label, rate in levels.items() if rate}
    return {"bytes_per_second": found.get("dram_bytes_per_second"), "levels": known}


def _point_notes(traffics: Sequence[data.Traffic], views: Sequence[View]) -> str:
    """Return what the markers mean."""
    points = [point for view in views for point in view.data["points"]]
    notes = ["Whole steps, over their unprofiled time"]
    if any(point["kernel"] for point in points):
        notes.append("small and numbered: the kernels that move most, over their own time")
    if any(point["hollow"] for point in points):
        bytes_too = any(traffic.estimated for traffic in traffics)
        notes.append(f"hollow: {'bytes and operations' if bytes_too else 'operations'} are an estimate")
    if not any(traffic.ceilings for traffic in traffics):
        notes.append("no roofs were measured here")
    return "; ".join(notes)


def _roofline_says(group: Sequence[data.Traffic]) -> str:
    """Return what share of its roof each step reaches."""
    shares, told = [], []
    for each in group:
        roofs = _roofs_over(each)
        bandwidth, fastest = roofs["bytes_per_second"], max(roofs["levels"].values(), default=None)
        reached = bandwidth and fastest and min(bandwidth * (each.intensity or 0), fastest)
        shares.append((each.flop_rate or 0) / reached if reached else None)
        mark = data.marked_estimate("", each.flops_estimated)
        rate = f"{mark}{format_rate(each.flop_rate, 'FLOP')} at {mark}{each.intensity:.3g} FLOP a byte"
        name = f"{each.method}{f' ({data.APPROXIMATELY} estimate)' if each.estimated else ''}"
        told.append(f"{name} {rate}" if shares[-1] is None else f"{name} {mark}{shares[-1]:.0%} ({rate})")
    what = "A step computes" if None in shares else "Of what this machine reaches at the same FLOP a byte"
    return f"{what}: {', '.join(told)}."


PANELS_ACROSS = 2
STEP_MARKER, KERNEL_MARKER = 6.5, 3.0  # points
NAMED_KERNELS = 4
LONGEST_POINT = 24  # characters
SPAN = 100.0  # the least that an axis spans
ROOM = 3.0  # an axis goes this factor beyond its points


def _heading(what: str, rows: Sequence[Row], estimated: Iterable[bool], note: str) -> list[str]:
    """Return the lines above a figure: the quantity, marked if it is an estimate, the rows, and a note."""
    told = f"{what}: an ESTIMATE from tensor sizes, not measured" if all(estimated) else what
    return [told, drawing.describe([row for row in rows if traffic_of(row)]), note]


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
        drawing.BarPanel(
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
        label: drawing.filled(part["colour"], part["private"] or label == "written")
        for own in parts
        for label, part in own.items()
    }
    estimated = [bar["estimated"] for bar in bars]
    mixed = any(estimated) and not all(estimated)
    note = f"× standard behind each bar{'; ≈ and pale: an estimate from tensor sizes, not measured' if mixed else ''}"
    title = _heading("DRAM bytes that one training step moves", rows, estimated, note)
    return drawing.draw_bars(title, panels, looks, columns=PANELS_ACROSS)


@drawing.styled
def draw_roofline(rows: Sequence[Row]) -> Figure | None:
    """Return every size in a panel of its own, on one scale; None if no row has bytes, operations and a time."""
    chart = roofline(rows)
    if chart is None:
        return None
    views = [view.data for view in chart.views]
    columns = min(PANELS_ACROSS, len(views))
    every = [point for view in views for point in view["points"]]
    kernels = list(dict.fromkeys(point["name"] for point in every if point["kernel"]))[:NAMED_KERNELS]
    points = [_points(view["points"], kernels) for view in views]
    figure, axes = drawing.new_panels(len(views), columns, 0.8, [2.9] * -(-len(views) // columns))
    for ax, view, own, of in zip(axes, views, points, chart.views, strict=True):
        ax.set_title(of.size if len(views) > 1 else "", loc="left", fontweight="bold")
        _set_axes(ax, view["roofs"], every)
        drawing.draw_points(ax, own)
    steps = [point["estimated"] for point in every if not point["kernel"]]
    note = chart.how.partition(".")[0]  # what the markers mean
    drawing.set_title(figure, *_heading("Roofline of one training step", rows, steps, note))
    drawing.name_points(figure, [point for own in points for point in own], columns=4)
    drawing.settle(figure)
    for ax, view in zip(axes, views, strict=True):
        _draw_roofs(ax, view["roofs"])
    return figure


def _points(drawn: Sequence[dict[str, Any]], named: Sequence[str]) -> list[drawing.Point]:
    """Return the points with their names; a kernel that has a name is drawn as its number."""
    points = []
    for each in drawn:
        look = {key: each[key] for key in ("x", "y", "colour", "marker", "hollow")}
        label, size = shorten(each["name"], LONGEST_POINT) + (" (estimate)" if each["estimated"] else ""), STEP_MARKER
        if each["name"] in named:
            label, look["marker"] = shorten(each["name"], LONGEST_POINT), f"${named.index(each['name']) + 1}$"
        elif each["kernel"]:
            label, size = "", KERNEL_MARKER
        points.append(drawing.Point(label=label, size=size, **look))
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


def _draw_roofs(ax: Axes, roofs: dict[str, Any]) -> None:
    """Draw the measured ceilings with their values."""
    bandwidth = roofs["bytes_per_second"]
    (left, right), (low, _) = ax.get_xlim(), ax.get_ylim()
    highest = max(roofs["levels"].values(), default=None)
    for name, rate in roofs["levels"].items():
        start = max(left, rate / bandwidth) if bandwidth else left
        _draw_line(ax, (start, rate), (right, rate), "-" if rate == highest else "--")
        _write(ax, f"{name} {format_rate(rate, 'FLOP')}", (right, rate), (-2, 2), ha="right")
    if bandwidth:
        end = min(right, highest / bandwidth) if highest else right
        _draw_line(ax, (left, bandwidth * left), (end, bandwidth * end), "-")
        start = max(left, low / bandwidth) * 1.15  # where the line enters the panel
        (x0, y0), (x1, y1) = ax.transData.transform([(start, bandwidth * start), (end, bandwidth * end)])
        along: dict[str, Any] = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
        _write(ax, f"DRAM {format_rate(bandwidth)}", (start, bandwidth * start), (0, 2), **along)


def _draw_line(ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    line: dict[str, Any] = {"color": "0.35", "linewidth": 0.9, "zorder": 1, "scalex": False, "scaley": False}
    ax.plot(*zip(start, end, strict=True), linestyle=style, **line)


def _write(ax: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    look: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "fontsize": drawing.SMALL, "color": "0.25"}
    ax.annotate(text, point, offset, **look, **style)


_of_all_sizes = partial(figure_output, instrument="ncu", sizes_apart=False)
TRAFFIC_BYTES = _of_all_sizes("traffic_bytes", "DRAM bytes of a step by family of kernels", draw_traffic_bytes)
ROOFLINE = _of_all_sizes("roofline", "operations a byte against what the GPU can do", draw_roofline)

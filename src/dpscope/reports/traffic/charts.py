"""The page's charts of traffic: the DRAM bytes of a step, and how fast it computes below the machine's roofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpscope.reports.page.chart import Chart, Table, View, chart_of
from dpscope.reports.palette import DIRECTION_COLOURS, FAMILY_COLOURS, PRIVATE_FAMILIES, is_dark, looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic import data
from dpscope.results.kernels import moved
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED, READ, WRITE
from dpscope.units import format_rate, format_ratio, format_traffic
from dpscope.vocabulary.families import FAMILY_LABELS
from dpscope.vocabulary.methods import STANDARD

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
    families = _parts("family", data.families_of(group))
    moved = {"read": [each.figure(READ) for each in group], "written": [each.figure(WRITE) for each in group]}
    # Stacks of bars: families where every method of the size has kernel rows, and the two directions.
    drawn = families if all(each.by_family for each in group) else []
    columns = ("method", "source", READ, WRITE, "dram_bytes", "ratio_to_standard", "kernels_source")
    lines = []
    for place, each in enumerate(group):
        figures = (each.figure(READ), each.figure(WRITE), each.dram_bytes, each.ratio)
        kernels = (each.kernels.source if each.kernels else None, *(part["bytes"][place] for part in families))
        lines.append((each.method, each.source, *figures, *kernels))
    return View(
        size=group[0].row.size,
        says=_says(group),
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


def _says(group: Sequence[data.Traffic]) -> str:
    told = []
    for each in group:
        ratio = "" if each.ratio is None or each.method == STANDARD else f" ({each.show(format_ratio(each.ratio))})"
        told.append(f"{each.show(format_traffic(each.dram_bytes))}{ratio} with {each.method}")
    estimates = [each.estimated for each in group]
    verb = f"{data.APPROXIMATELY} estimate: a step has to move" if all(estimates) else "A step moves"
    partly = f" {data.APPROXIMATELY}: an estimate." if any(estimates) and not all(estimates) else ""
    return f"{verb} {', '.join(told)}.{partly}"


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
        notes.append("small: the kernels that move most, over their own time")
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

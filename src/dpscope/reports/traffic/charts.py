"""The page's charts of traffic: the DRAM bytes of a step, and how fast it computes below the machine's roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpscope.reports.page.chart import Chart, Table, View, chart_of
from dpscope.reports.palette import is_dark, looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic import data
from dpscope.reports.traffic.data import Traffic, by_size, moved
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED, READ, WRITE
from dpscope.units import format_rate, format_ratio, format_traffic
from dpscope.vocabulary.methods import STANDARD

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
    """No reader should take an estimate for a measurement, not even one who reads titles only."""
    estimated = [each.estimated for each in traffics]
    return f" ({'' if all(estimated) else 'partly '}{data.APPROXIMATELY} estimate)" if any(estimated) else ""


def _view(group: Sequence[data.Traffic]) -> View:
    families, directions = data.family_parts(group), data.direction_parts(group)
    # Stacks of bars: families where every method of the size has kernel rows, and the two directions.
    drawn = families if all(each.by_family for each in group) else []
    parts = [_part("family", part) for part in drawn] + [_part("direction", part) for part in directions]
    columns = ("method", "source", READ, WRITE, "dram_bytes", "ratio_to_standard", "kernels_source")
    lines = []
    for place, each in enumerate(group):
        figures = (each.figure(READ), each.figure(WRITE), each.dram_bytes, each.ratio)
        kernels = (each.kernels.source if each.kernels else None, *(part.counts[place] for part in families))
        lines.append((each.method, each.source, *figures, *kernels))
    return View(
        size=group[0].row.size,
        says=_says(group),
        data={"bars": [_bar(each) for each in group], "parts": parts},
        table=Table(columns=(*columns, *(f"{part.label} (bytes)" for part in families)), rows=lines),
    )


def _bar(each: data.Traffic) -> dict[str, Any]:
    moved = {"bytes": each.dram_bytes, "read_bytes": each.figure(READ), "written_bytes": each.figure(WRITE)}
    item = {"per_item_bytes": each.bytes_per_item, "item": each.items[1]}
    rate = {"bandwidth": each.bandwidth, "bandwidth_fraction": each.bandwidth_fraction}
    return {"method": each.method, "estimated": each.estimated, **moved, "ratio": each.ratio, **item, **rate}


def _part(stack: str, part: data.Part) -> dict[str, Any]:
    look = {"colour": part.colour, "dark": part.colour is not None and is_dark(part.colour), "private": part.private}
    return {"stack": stack, "label": part.label, **look, "bytes": part.counts}


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
    """None if no row has bytes, operations and a time."""
    found = rooflines(rows)
    every = [traffic for each in found for traffic in each.traffics]
    measured = dict.fromkeys(how for each in every if (how := each.ceilings.get("how")))
    roofs = f" Roofs as measured on this machine: {'; '.join(measured)}." if measured else ""
    return chart_of(
        (_roofline_view(each, looks_of(rows)) for each in found),
        key="roofline",
        title=f"Roofline{_estimate_in_title(every)}",
        nav_label="Roofline",
        how=f"{point_notes(found)}.{roofs} It does not see caches: only DRAM bytes count.",
    )


def _roofline_view(found: Roofline, looks: dict[str, dict[str, str]]) -> View:
    source = {True: ESTIMATE, False: MEASURED}
    return View(
        size=found.traffics[0].row.size,
        says=_roofline_says(found),
        data={
            "roofs": {"bytes_per_second": found.roofs.bandwidth, "levels": found.roofs.levels},
            "points": [{**asdict(point), **looks[point.method]} for point in found.points],
        },
        table=Table(
            columns=("point", "method", "flops_per_byte", "flops_per_second", "operations", "bytes"),
            rows=[(p.name, p.method, p.x, p.y, source[p.hollow], source[p.estimated]) for p in found.points],
        ),
    )


def _roofline_says(found: Roofline) -> str:
    shares, told = [_share_of_roof(each) for each in found.traffics], []
    for each, share in zip(found.traffics, shares, strict=True):
        mark = data.marked_estimate("", each.flops_estimated)
        rate = f"{mark}{format_rate(each.flop_rate, 'FLOP')} at {mark}{each.intensity:.3g} FLOP a byte"
        name = f"{each.method}{f' ({data.APPROXIMATELY} estimate)' if each.estimated else ''}"
        told.append(f"{name} {rate}" if share is None else f"{name} {mark}{share:.0%} ({rate})")
    what = "A step computes" if None in shares else "Of what this machine reaches at the same FLOP a byte"
    return f"{what}: {', '.join(told)}."


def _share_of_roof(each: data.Traffic) -> float | None:
    """Of the lower of the two roofs over a point: what DRAM lets through, and what computes fastest."""
    roofs = Roofs.over(each)
    if not roofs.bandwidth or not roofs.levels or not each.intensity or not each.flop_rate:
        return None
    return each.flop_rate / min(roofs.bandwidth * each.intensity, max(roofs.levels.values()))


DRAWN_KERNELS = 6  # of each method


@dataclass(frozen=True)
class RooflinePoint:
    """FLOP a byte, FLOP a second."""

    x: float
    y: float
    name: str  # a method's, or a kernel's in full
    method: str
    hollow: bool = False  # the operations are an estimate, and with them the bytes or not
    estimated: bool = False  # the bytes are
    kernel: bool = False


@dataclass(frozen=True)
class Roofs:
    """What the machine reaches, as far as it was measured."""

    bandwidth: float | None  # DRAM bytes a second
    levels: dict[str, float]  # what computes -> FLOP a second of matrix products

    @classmethod
    def over(cls, traffic: Traffic) -> Roofs:
        found = traffic.ceilings
        levels = {"tensor cores": found.get("tensor_flops_per_second"), "FP32": found.get("fp32_flops_per_second")}
        return cls(found.get("dram_bytes_per_second"), {label: rate for label, rate in levels.items() if rate})


@dataclass(frozen=True)
class Roofline:
    """Rows of one size that have bytes, operations and a time."""

    traffics: list[Traffic]
    points: list[RooflinePoint]  # whole steps, then kernels by their bytes
    roofs: Roofs


def rooflines(rows: Sequence[Row]) -> list[Roofline]:
    """One for each size."""
    found = []
    for group in by_size(rows, lambda traffic: traffic.intensity and traffic.flop_rate):
        steps = [
            RooflinePoint(t.intensity or 0, t.flop_rate or 0, t.method, t.method, t.flops_estimated, t.estimated)
            for t in group
        ]
        found.append(Roofline(group, [*steps, *_kernel_points(group)], Roofs.over(group[0])))
    return found


def _kernel_points(group: Sequence[Traffic]) -> list[RooflinePoint]:
    """The measured kernels that move most, of those that have operations to count."""
    found = []
    for traffic in group:
        kernels = [] if traffic.kernels is None or traffic.kernels.estimated else traffic.kernels.rows
        counted = [
            (count, flops, time, kernel["name"])
            for kernel in kernels
            if (count := moved(kernel)) and (flops := kernel.get("flops")) and (time := kernel.get("time_ns"))
        ]
        for count, flops, time, name in sorted(counted, key=lambda each: -each[0])[:DRAWN_KERNELS]:
            found.append((count, RooflinePoint(flops / count, flops / (time / 1e9), name, traffic.method, kernel=True)))
    return [point for _, point in sorted(found, key=lambda pair: -pair[0])]


def point_notes(rooflines: Sequence[Roofline]) -> str:
    """What the markers mean."""
    traffics = [traffic for each in rooflines for traffic in each.traffics]
    points = [point for each in rooflines for point in each.points]
    notes = ["Whole steps, over their unprofiled time"]
    if any(point.kernel for point in points):
        notes.append("small: the kernels that move most, over their own time")
    if any(point.hollow for point in points):
        bytes_too = any(traffic.estimated for traffic in traffics)
        notes.append(f"hollow: {'bytes and operations' if bytes_too else 'operations'} are an estimate")
    if not any(traffic.ceilings for traffic in traffics):
        notes.append("no roofs were measured here")
    return "; ".join(notes)

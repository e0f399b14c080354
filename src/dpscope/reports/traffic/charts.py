"""The page's charts of traffic: the DRAM bytes of a step, and how fast it computes below the machine's roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dpscope.reports.page.chart import Chart, Table, View, chart_of
from dpscope.reports.palette import is_dark, looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic import data
from dpscope.reports.traffic.roofline import Roofline, Roofs, point_notes, rooflines
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

"""Roofline: how fast a step computes against how much it computes for each DRAM byte, below the machine's roofs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.page.looks import looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic.chart import estimate_in_title
from dpscope.reports.traffic.data import APPROXIMATELY, Traffic
from dpscope.reports.traffic.roofline import (
    BANDWIDTH,
    Point,
    kernel_points,
    level_roofs,
    placed,
    point_notes,
    step_point,
)
from dpscope.reports.words import size_in_words
from dpscope.units import format_rate


def roofline(rows: Sequence[Row]) -> Chart | None:
    """None if no row has bytes, operations and a time."""
    groups = placed(rows)
    if not groups:
        return None
    every = [each for group in groups for each in group]
    points = [point for group in groups for point in (*map(step_point, group), *kernel_points(group))]
    return Chart(
        key="roofline",
        title=f"Roofline{estimate_in_title(every)}",
        nav_label="Roofline",
        kind="roofline",
        how=f"{point_notes(every, points)}.{_roofs_in_words(every)} It does not see caches: only DRAM bytes count.",
        views=[_view(group, rows) for group in groups],
    )


def _roofs_in_words(traffics: Sequence[Traffic]) -> str:
    measured = dict.fromkeys(str(each.ceilings["how"]) for each in traffics if each.ceilings.get("how"))
    return f" Roofs as measured on this machine: {'; '.join(measured)}." if measured else ""


def _view(group: Sequence[Traffic], rows: Sequence[Row]) -> View:
    looks = looks_of(rows)
    points = [*map(step_point, group), *kernel_points(group)]
    roofs = {"bytes_per_second": group[0].ceilings.get(BANDWIDTH), "levels": level_roofs(group[0])}
    return View(
        size=size_in_words(group[0].row.first.spec),
        says=_says(group),
        data={"roofs": roofs, "points": [_point(point, looks) for point in points]},
        table=Table(
            columns=("point", "method", "flops_per_byte", "flops_per_second", "operations", "bytes"),
            rows=[(p.name, p.method, p.x, p.y, _source(p.hollow), _source(p.estimated)) for p in points],
        ),
    )


def _point(point: Point, looks: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "x": point.x,
        "y": point.y,
        "name": point.name,
        "method": point.method,
        "hollow": point.hollow,
        "estimated": point.estimated,
        "kernel": point.kernel,
        **looks[point.method],
    }


def _source(estimated: bool) -> str:
    return "estimate" if estimated else "measured"


def _says(group: Sequence[Traffic]) -> str:
    told = ", ".join(map(_told, group))
    roofed = all(_share_of_roof(each) is not None for each in group)
    return f"{'Of what this machine reaches at the same FLOP a byte' if roofed else 'A step computes'}: {told}."


def _told(each: Traffic) -> str:
    mark = APPROXIMATELY if each.flops_estimated else ""
    rate = f"{mark}{format_rate(each.flop_rate, 'FLOP')} at {mark}{each.intensity:.3g} FLOP a byte"
    share = _share_of_roof(each)
    name = f"{each.row.method}{f' ({APPROXIMATELY} estimate)' if each.estimated else ''}"
    return f"{name} {rate}" if share is None else f"{name} {mark}{share:.0%} ({rate})"


def _share_of_roof(each: Traffic) -> float | None:
    """Of the lower of the two roofs over a point: what DRAM lets through, and what computes fastest."""
    bandwidth, levels = each.ceilings.get(BANDWIDTH), level_roofs(each).values()
    if not bandwidth or not levels or not each.intensity or not each.flop_rate:
        return None
    return float(each.flop_rate / min(bandwidth * each.intensity, max(levels)))

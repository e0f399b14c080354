"""Roofline: how fast a step computes against how much it computes for each DRAM byte, below the machine's roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.page.looks import looks_of
from dpscope.reports.tables import Row
from dpscope.reports.traffic.chart import estimate_in_title
from dpscope.reports.traffic.data import APPROXIMATELY, Traffic, marked_estimate
from dpscope.reports.traffic.roofline import Roofline, Roofs, point_notes, rooflines
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED
from dpscope.units import format_rate


def roofline(rows: Sequence[Row]) -> Chart | None:
    """None if no row has bytes, operations and a time."""
    found = rooflines(rows)
    if not found:
        return None
    every = [traffic for each in found for traffic in each.traffics]
    return Chart(
        key="roofline",
        title=f"Roofline{estimate_in_title(every)}",
        nav_label="Roofline",
        kind="roofline",
        how=f"{point_notes(found)}.{_roofs_in_words(every)} It does not see caches: only DRAM bytes count.",
        views=[_view(each, looks_of(rows)) for each in found],
    )


def _roofs_in_words(traffics: Sequence[Traffic]) -> str:
    measured = dict.fromkeys(how for each in traffics if (how := each.ceilings.get("how")))
    return f" Roofs as measured on this machine: {'; '.join(measured)}." if measured else ""


def _view(found: Roofline, looks: dict[str, dict[str, str]]) -> View:
    return View(
        size=found.traffics[0].row.size,
        says=_says(found),
        data={
            "roofs": {"bytes_per_second": found.roofs.bandwidth, "levels": found.roofs.levels},
            "points": [{**asdict(point), **looks[point.method]} for point in found.points],
        },
        table=Table(
            columns=("point", "method", "flops_per_byte", "flops_per_second", "operations", "bytes"),
            rows=[(p.name, p.method, p.x, p.y, _source(p.hollow), _source(p.estimated)) for p in found.points],
        ),
    )


def _source(estimated: bool) -> str:
    return ESTIMATE if estimated else MEASURED


def _says(found: Roofline) -> str:
    shares = [_share_of_roof(each) for each in found.traffics]
    told = ", ".join(_told(each, share) for each, share in zip(found.traffics, shares, strict=True))
    return f"{'A step computes' if None in shares else 'Of what this machine reaches at the same FLOP a byte'}: {told}."


def _told(each: Traffic, share: float | None) -> str:
    mark = marked_estimate("", each.flops_estimated)
    rate = f"{mark}{format_rate(each.flop_rate, 'FLOP')} at {mark}{each.intensity:.3g} FLOP a byte"
    name = f"{each.method}{f' ({APPROXIMATELY} estimate)' if each.estimated else ''}"
    return f"{name} {rate}" if share is None else f"{name} {mark}{share:.0%} ({rate})"


def _share_of_roof(each: Traffic) -> float | None:
    """Of the lower of the two roofs over a point: what DRAM lets through, and what computes fastest."""
    roofs = Roofs.over(each)
    if not roofs.bandwidth or not roofs.levels or not each.intensity or not each.flop_rate:
        return None
    return each.flop_rate / min(roofs.bandwidth * each.intensity, max(roofs.levels.values()))

"""The DRAM bytes that a step moves: read and written, and by family of kernels where those were looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.palette import is_dark
from dpscope.reports.tables import STANDARD, Row
from dpscope.reports.traffic.data import APPROXIMATELY, Traffic, by_size
from dpscope.reports.traffic.parts import direction_parts, family_parts
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED, READ, WRITE
from dpscope.units import format_ratio, format_traffic

HOW = {
    MEASURED: (
        "Measured: bytes between DRAM and L2 in one step, counted by the GPU under Nsight Compute. It does not see "
        "what stays in the caches."
    ),
    ESTIMATE: (
        f"{APPROXIMATELY} estimate: bytes of every operator's tensors in one step, computed from their sizes, not "
        "measured. It does not see caches, which keep part of this from DRAM, nor what an operator does inside."
    ),
}


def traffic(rows: Sequence[Row]) -> Chart | None:
    groups = by_size(rows, lambda each: each.dram_bytes)
    if not groups:
        return None
    every = [each for group in groups for each in group]
    return Chart(
        key="traffic",
        title=f"DRAM bytes of a step{estimate_in_title(every)}",
        nav_label="DRAM bytes",
        kind="traffic",
        how=" ".join(text for source, text in HOW.items() if any(each.source == source for each in every)),
        views=[_view(group) for group in groups],
    )


def estimate_in_title(traffics: Sequence[Traffic]) -> str:
    """No reader should take an estimate for a measurement, not even one who reads titles only."""
    estimated = [each.estimated for each in traffics]
    if not any(estimated):
        return ""
    return f" ({'' if all(estimated) else 'partly '}{APPROXIMATELY} estimate)"


def _view(group: Sequence[Traffic]) -> View:
    return View(
        size=group[0].row.size,
        says=_says(group),
        data={"bars": [_bar(each) for each in group], "parts": _parts(group)},
        table=_table(group),
    )


def _bar(each: Traffic) -> dict[str, Any]:
    return {
        "method": each.method,
        "estimated": each.estimated,
        "bytes": each.dram_bytes,
        "read_bytes": each.figure(READ),
        "written_bytes": each.figure(WRITE),
        "ratio": each.ratio,
        "per_item_bytes": each.bytes_per_item,
        "item": each.items[1],
        "bandwidth": each.bandwidth,
        "bandwidth_fraction": each.bandwidth_fraction,
    }


def _parts(group: Sequence[Traffic]) -> list[dict[str, Any]]:
    """Stacks of bars: families where every method of the size has kernel rows, and the two directions."""
    families = family_parts(group) if all(each.by_family for each in group) else []
    return [
        {
            "stack": stack,
            "label": part.label,
            "colour": part.colour,
            "dark": part.colour is not None and is_dark(part.colour),
            "private": part.private,
            "bytes": part.counts,
        }
        for stack, parts in (("family", families), ("direction", direction_parts(group)))
        for part in parts
    ]


def _says(group: Sequence[Traffic]) -> str:
    told = []
    for each in group:
        ratio = "" if each.ratio is None or each.method == STANDARD else f" ({each.show(format_ratio(each.ratio))})"
        told.append(f"{each.show(format_traffic(each.dram_bytes))}{ratio} with {each.method}")
    estimate = all(each.estimated for each in group)
    verb = f"{APPROXIMATELY} estimate: a step has to move" if estimate else "A step moves"
    partly = "" if estimate or not any(each.estimated for each in group) else f" {APPROXIMATELY}: an estimate."
    return f"{verb} {', '.join(told)}.{partly}"


def _table(group: Sequence[Traffic]) -> Table:
    families = family_parts(group)
    columns = ("method", "source", READ, WRITE, "dram_bytes", "ratio_to_standard", "kernels_source")
    return Table(
        columns=(*columns, *(f"{part.label} (bytes)" for part in families)),
        rows=[
            (
                *(each.method, each.source, each.figure(READ), each.figure(WRITE), each.dram_bytes, each.ratio),
                each.kernels.source if each.kernels else None,
                *(part.counts[place] for part in families),
            )
            for place, each in enumerate(group)
        ],
    )

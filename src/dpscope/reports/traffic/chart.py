"""The DRAM bytes that a step moves: read and written, and by family of kernels where those were looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.palette import DIRECTION_COLOURS, FAMILY_COLOURS, PRIVATE_FAMILIES, is_dark
from dpscope.reports.tables import STANDARD, Row
from dpscope.reports.traffic.data import (
    APPROXIMATELY,
    ESTIMATE,
    MEASURED,
    READ,
    UNSEEN,
    WRITE,
    Traffic,
    by_size,
    compare_traffic,
)
from dpscope.reports.words import size_in_words
from dpscope.units import format_ratio, format_traffic
from dpscope.vocabulary.families import FAMILIES, FAMILY_LABELS

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
LABELS = {**FAMILY_LABELS, UNSEEN: UNSEEN}


def traffic(rows: Sequence[Row]) -> Chart | None:
    groups = [[t for t in group if t.dram_bytes] for group in by_size(compare_traffic(rows))]
    groups = [group for group in groups if group]
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
    return f" ({APPROXIMATELY} estimate)" if all(estimated) else f" (partly {APPROXIMATELY} estimate)"


def _view(group: Sequence[Traffic]) -> View:
    return View(
        size=size_in_words(group[0].row.first.spec),
        says=_says(group),
        data={"bars": [_bar(each) for each in group], "parts": _parts(group)},
        table=_table(group),
    )


def _bar(each: Traffic) -> dict[str, Any]:
    return {
        "method": each.row.method,
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
    parts: list[dict[str, Any]] = []
    if all(each.by_family for each in group):
        shares = [each.family_parts() for each in group]
        for family in (*FAMILIES, UNSEEN):
            if any(share.get(family) for share in shares):
                colour = FAMILY_COLOURS.get(family)  # none: what was not seen is left blank
                private = family in PRIVATE_FAMILIES
                counts = [share.get(family) for share in shares]
                parts.append(_part("family", LABELS[family], colour, counts) | {"private": private})
    for name, key in (("read", READ), ("written", WRITE)):
        parts.append(_part("direction", name, DIRECTION_COLOURS[name], [each.figure(key) for each in group]))
    return parts


def _part(stack: str, label: str, colour: str | None, counts: Sequence[float | None]) -> dict[str, Any]:
    dark = colour is not None and is_dark(colour)
    return {"stack": stack, "label": label, "colour": colour, "dark": dark, "private": False, "bytes": counts}


def _says(group: Sequence[Traffic]) -> str:
    told = []
    for each in group:
        mark = APPROXIMATELY if each.estimated else ""
        ratio = "" if each.ratio is None or each.row.method == STANDARD else f" ({mark}{format_ratio(each.ratio)})"
        told.append(f"{mark}{format_traffic(each.dram_bytes)}{ratio} with {each.row.method}")
    estimate = all(each.estimated for each in group)
    verb = f"{APPROXIMATELY} estimate: a step has to move" if estimate else "A step moves"
    partly = "" if estimate or not any(each.estimated for each in group) else f" {APPROXIMATELY}: an estimate."
    return f"{verb} {', '.join(told)}.{partly}"


def _table(group: Sequence[Traffic]) -> Table:
    families = [family for family in (*FAMILIES, UNSEEN) if any(family in each.family_parts() for each in group)]
    columns = ("method", "source", READ, WRITE, "dram_bytes", "ratio_to_standard", "kernels_source")
    return Table(
        columns=(*columns, *(f"{LABELS[family]} (bytes)" for family in families)),
        rows=[
            (
                *(each.row.method, each.source, each.figure(READ), each.figure(WRITE), each.dram_bytes, each.ratio),
                each.kernels.source if each.kernels else None,
                *(each.family_parts().get(family) for family in families),
            )
            for each in group
        ],
    )

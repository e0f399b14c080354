"""The largest tensors at the peak: a bar each, with shape, and the line of code that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.memory.chart_series import looks, unit_for
from dpscope.reports.memory.data import label_of, tensors_of
from dpscope.reports.memory.tensors import maker_of, place_of, shape_in_words, short_place_of
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.tables import Row
from dpscope.results.payloads.memory import TensorAtPeak, TensorsAtPeak
from dpscope.units import format_bytes

BARS_DRAWN = 8  # of each method
TENSOR_COLUMNS = ("method", "bytes", "count", "shape", "dtype", "component", "module", "phase", "operator", "line")


def _view(rows: Sequence[Row]) -> View | None:
    known = [(row.method, tensors) for row in rows if (tensors := tensors_of(row))]
    if not known:
        return None
    return View(
        says=" ".join(f"The largest of {method}: {_in_words(tensors['largest'][0])}." for method, tensors in known),
        data={
            "axis": unit_for(max(tensor["bytes"] for _, tensors in known for tensor in tensors["largest"])),
            "panels": [
                {"method": method, "bars": list(map(_bar, tensors["largest"][:BARS_DRAWN]))}
                for method, tensors in known
            ],
        },
        table=Table(columns=TENSOR_COLUMNS, rows=[line for each in known for line in _lines(*each)]),
    )


def _in_words(first: TensorAtPeak) -> str:
    several = f"{first['count']} of them, each" if first["count"] > 1 else "it is"
    what = f"{shape_in_words(first)}, {label_of(first['component'])}, {short_place_of(first)}"
    return f"{several} {format_bytes(first['bytes'])} ({what})"


def _bar(tensor: TensorAtPeak) -> dict[str, Any]:
    maker, made = maker_of(tensor), bool(tensor["operator"])
    return {
        **looks([tensor["component"]])[0],
        "bytes": tensor["bytes"],
        "count": tensor["count"],
        "shape": shape_in_words(tensor),
        "maker": maker,
        "where": place_of(tensor) if made else f"{maker}, {place_of(tensor)}",
        "short": short_place_of(tensor) if made else maker,
        "phase": tensor["phase"],
    }


def _lines(method: str, tensors: TensorsAtPeak) -> list[tuple[Any, ...]]:
    lines: list[tuple[Any, ...]] = [
        (
            *(method, each["bytes"], each["count"], "×".join(map(str, each["shape"])), each["dtype"]),
            *(label_of(each["component"]), each["module"], each["phase"], each["operator"], place_of(each)),
        )
        for each in tensors["largest"]
    ]
    rest = tensors["rest"]["bytes"]
    return lines + ([(method, rest, 1, "", "", "all others together", "", "", "", "")] if rest else [])


tensors_at_peak = chart_by_size(
    _view,
    key="tensors",
    title="Largest tensors at the peak",
    nav_label="Tensors",
    kind="tensors",
    how=(
        "Every storage that was live at the peak of a tracked step, the largest first, with the shape it was made "
        "in, what it is for, and the innermost line of Python outside torch that asked for it; alike ones of "
        "several layers share a bar, which is as long as one of them. It does not see what an operator allocates "
        "and frees inside itself."
    ),
)

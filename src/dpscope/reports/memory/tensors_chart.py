"""The largest tensors at the peak: a bar each, with shape, and the line of code that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.memory.chart_series import looks, unit_for
from dpscope.reports.memory.data import label_of
from dpscope.reports.memory.tensors import TensorAtPeak, tensors_of
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.tables import Row
from dpscope.units import format_bytes

DRAWN = 8  # of each method
COLUMNS = ("method", "bytes", "count", "shape", "dtype", "component", "module", "phase", "operator", "line")


def _view(rows: Sequence[Row]) -> View | None:
    known = [(row.method, *tensors_of(row)) for row in rows]
    known = [each for each in known if each[1]]
    if not known:
        return None
    largest = max(tensor.bytes for _, tensors, _ in known for tensor in tensors)
    return View(
        says=" ".join(_in_words(method, tensors) for method, tensors, _ in known),
        data={
            "axis": unit_for(largest),
            "panels": [
                {"method": method, "bars": [_bar(tensor) for tensor in tensors[:DRAWN]]} for method, tensors, _ in known
            ],
        },
        table=Table(
            columns=COLUMNS,
            rows=[line for method, tensors, rest in known for line in _lines(method, tensors, rest)],
        ),
    )


def _in_words(method: str, tensors: Sequence[TensorAtPeak]) -> str:
    first = tensors[0]
    several = f"{first.count} of them, each" if first.count > 1 else "it is"
    return (
        f"The largest of {method}: {several} {format_bytes(first.bytes)} ({first.shape_in_words}, "
        f"{label_of(first.component)}, {first.where_in_short})."
    )


def _bar(tensor: TensorAtPeak) -> dict[str, Any]:
    return {
        **looks([tensor.component])[0],
        "bytes": tensor.bytes,
        "count": tensor.count,
        "shape": tensor.shape_in_words,
        "maker": tensor.maker,
        "where": tensor.where if tensor.operator else f"{tensor.maker}, {tensor.where}",
        "short": tensor.where_in_short if tensor.operator else tensor.maker,
        "phase": tensor.phase,
    }


def _lines(method: str, tensors: Sequence[TensorAtPeak], rest: float) -> list[tuple[Any, ...]]:
    lines: list[tuple[Any, ...]] = [
        (
            *(method, each.bytes, each.count, "×".join(map(str, each.shape)), each.dtype, label_of(each.component)),
            *(each.module, each.phase, each.operator, each.where),
        )
        for each in tensors
    ]
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

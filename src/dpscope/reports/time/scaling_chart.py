"""How the cost grows: time and memory against batch size and against sequence length, failures among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.doubt import marked
from dpscope.reports.page.chart import Chart, View
from dpscope.reports.page.looks import looks_of
from dpscope.reports.page.series import cost_table, named
from dpscope.reports.tables import Row
from dpscope.units import format_bytes, format_ms, format_ratio
from dpscope.vocabulary.methods import STANDARD


@dataclass(frozen=True)
class Way:
    """What varies along the horizontal axis, and what a panel holds fixed."""

    key: str
    varies: str
    word: str
    axis: str
    fixed: str
    fixed_word: str


BATCH = Way("scaling-batch", "batch_size", "batch", "batch size", "seq_len", "sequence")
SEQUENCE = Way("scaling-sequence", "seq_len", "sequence", "sequence length", "batch_size", "batch")

Panel = list[Row]


def scaling_over_batch(rows: Sequence[Row]) -> Chart | None:
    return _scaling(rows, BATCH)


def scaling_over_sequence(rows: Sequence[Row]) -> Chart | None:
    return _scaling(rows, SEQUENCE)


def _scaling(rows: Sequence[Row], way: Way) -> Chart | None:
    """None unless something was measured at two values of what varies, all else being equal."""
    panels = _panels(rows, way)
    if not panels:
        return None
    shown = [row for panel in panels for row in panel]
    # Multiples where all have one; else no row would be missing but for want of a denominator.
    relative = all(row.time_ratio is not None for row in shown if row.median_ms)
    capacity = max((row.first.environment.get("gpu_memory_bytes") or 0 for row in shown), default=0)
    return Chart(
        key=way.key,
        title=f"How the cost grows with {way.axis}",
        nav_label=way.axis.partition(" ")[0].capitalize(),
        kind="scaling",
        how=(
            f"Median time of a step{', as a multiple of the time of standard at the same size' if relative else ''}, "
            "and peak of allocated bytes, each size in a process of its own; a cross at the top is a size that could "
            "not be measured. It does not see sizes between the points."
        ),
        views=[
            View(
                size="",
                says=_says(panels, way, relative=relative)
                + named("Could not be measured", [(row, row.result.status) for row in shown if not row.result.ok]),
                data={
                    "axis": way.axis,
                    "relative": relative,
                    "capacity_bytes": capacity or None,
                    "panels": [_panel(panel, way, rows) for panel in panels],
                },
                table=cost_table(shown),
            )
        ],
    )


def _panels(rows: Sequence[Row], way: Way) -> list[Panel]:
    groups: dict[Any, Panel] = {}
    for row in rows:
        if row.first.spec.get(way.varies):
            groups.setdefault(row.first.spec.get(way.fixed), []).append(row)
    return [
        sorted(group, key=lambda row: _x(row, way))
        for group in groups.values()
        if len({_x(row, way) for row in group}) > 1 and any(row.median_ms or row.peak_bytes for row in group)
    ]


def _x(row: Row, way: Way) -> int:
    return int(row.first.spec[way.varies])


def _panel(panel: Panel, way: Way, rows: Sequence[Row]) -> dict[str, Any]:
    looks = looks_of(rows)
    fixed = panel[0].first.spec.get(way.fixed)
    return {
        "title": f"{way.fixed_word} {fixed}" if fixed else "",
        "lines": [
            {"method": method, **looks[method], "points": [_point(r, way) for r in panel if r.method == method]}
            for method in looks
            if any(row.method == method for row in panel)
        ],
    }


def _point(row: Row, way: Way) -> dict[str, Any]:
    return {
        "x": _x(row, way),
        "median_ms": row.median_ms,
        "peak_bytes": row.peak_bytes,
        "time_ratio": row.time_ratio,
        "memory_ratio": row.memory_ratio,
        "mark": marked("", row.ratio_doubt),
        "status": row.result.status,
    }


def _says(panels: Sequence[Panel], way: Way, *, relative: bool) -> str:
    """Of the panel with most sizes: from its smallest to its largest."""
    panel = max(panels, key=len)
    told = []
    for method in dict.fromkeys(row.method for row in panel):
        own = [row for row in panel if row.method == method]
        times = [row.time_ratio if relative else row.median_ms for row in own]
        peaks = [row.peak_bytes for row in own if row.peak_bytes]
        parts = [_from_to([t for t in times if t], format_ratio if relative else format_ms)]
        if relative and method == STANDARD:
            parts = []
        parts += [_from_to(peaks, format_bytes)]
        if any(parts):
            doubt = marked("", "".join(row.ratio_doubt for row in own))
            told.append(f"{method}{doubt} {', '.join(filter(None, parts))}")
    fixed = panel[0].first.spec.get(way.fixed)
    where = f" at {way.fixed_word} {fixed}" if fixed else ""
    what = f"time{' against standard' if relative else ''} and peak memory"
    sizes = f"{way.word} {_x(panel[0], way)} to {_x(panel[-1], way)}"
    return f"From {sizes}{where}, {what}: {'; '.join(told)}."


def _from_to(values: Sequence[float], read: Any) -> str:
    """First and last, in the order of the axis: `1.10× to 1.02×`."""
    return " to ".join(dict.fromkeys((read(values[0]), read(values[-1])))) if values else ""

"""Time of a step, every step of it: the median as a bar, the steps as points."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.reports.doubt import explain, marked
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.page.looks import looks_of
from dpscope.reports.tables import SPEEDS, Row
from dpscope.units import format_ms, format_ratio, format_throughput
from dpscope.vocabulary.methods import STANDARD


def _view(rows: Sequence[Row]) -> View | None:
    timed = [row for row in rows if row.median_ms is not None]
    if not timed:
        return None
    bars = [
        {
            "method": row.method,
            "colour": looks_of(rows)[row.method]["colour"],
            "median_ms": row.median_ms,
            "spread_ms": row.spread_ms,
            "ratio": row.time_ratio,
            "marks": [marked("", doubt) for doubt in (row.time_doubt, row.ratio_doubt)],  # of the time, of the ratio
            "per_second": [f"{format_throughput(rate(row))} {name}" for name, rate in SPEEDS.items() if rate(row)],
            "steps_ms": row.timing.get("step_ms") or [],
        }
        for row in timed
    ]
    costs = [f"{marked(format_ms(row.median_ms), row.time_doubt)}{_ratio(row)} with {row.method}" for row in timed]
    return View(
        says=" ".join(filter(None, (f"A step takes {', '.join(costs)}.", explain(row.ratio_doubt for row in timed)))),
        data={"bars": bars},
        table=Table(
            columns=("method", "median_ms", "p10_ms", "p90_ms", *SPEEDS, "ratio_to_standard", "doubt"),
            rows=[
                (
                    *(row.method, row.median_ms, *(row.spread_ms or (None, None))),
                    *(rate(row) for rate in SPEEDS.values()),
                    *(row.time_ratio, row.ratio_doubt or None),
                )
                for row in timed
            ],
        ),
    )


def _ratio(row: Row) -> str:
    if row.time_ratio is None or row.method == STANDARD:
        return ""
    return f" ({marked(format_ratio(row.time_ratio), row.ratio_doubt)})"


step_time = chart_by_size(
    _view,
    key="step-time",
    title="Time of a step",
    nav_label="Time",
    kind="step-time",
    how=(
        "A bar is the median of the timed steps after warm-up; below it each point is one step, and the line "
        "spans their 10th to 90th percentile, in a process without any profiler. It does not see data loading: "
        "every step trains on the same batch."
    ),
)

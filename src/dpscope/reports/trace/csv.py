"""The tables of traces in full, for spreadsheets: a line an operator or kernel of each method at each size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dpscope.reports.output import csv_output
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import trace_of


def _lines(part: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {**_what(row), **{key: round(v, 6) if isinstance(v, float) else v for key, v in line.items()}}
        for row in rows
        for line in trace_of(row).get(part, [])
    ]


def _what(row: Row) -> dict[str, object]:
    spec = row.first.spec
    keys = ("batch_size", "seq_len", "dtype")
    return {"model": spec["workload"]["name"], "method": row.method, **{key: spec[key] for key in keys}}


TRACE_CSV = tuple(
    csv_output(f"trace_{part}.csv", f"all {part} of a step", partial(_lines, part), instrument="trace")
    for part in ("operators", "kernels")
)

"""The tables of traces in full, for spreadsheets: `trace_operators.csv` and `trace_kernels.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from dpscope.reports.tables import Row
from dpscope.reports.trace.data import trace_of
from dpscope.results.store import write_atomically

# File -> the part of a trace it holds.
TABLES = {"trace_operators.csv": "operators", "trace_kernels.csv": "kernels"}


def write_trace_csv(rows: Sequence[Row], folder: Path, formats: Sequence[str] = ()) -> list[Path]:
    """One file a table, a line an operator or kernel of each method at each size; milliseconds of an average step."""
    paths = []
    for name, part in TABLES.items():
        lines = [
            {**_what(row), **{key: round(v, 6) if isinstance(v, float) else v for key, v in line.items()}}
            for row in rows
            for line in trace_of(row).get(part, [])
        ]
        if lines:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(lines)
            write_atomically(folder / name, text.getvalue())
            paths.append(folder / name)
    return paths


def _what(row: Row) -> dict[str, object]:
    spec = row.first.spec
    keys = ("batch_size", "seq_len", "dtype")
    return {"model": spec["workload"]["name"], "method": row.method, **{key: spec[key] for key in keys}}

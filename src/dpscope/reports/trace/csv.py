"""The tables of traces in full, for spreadsheets: a line an operator or kernel of each method at each size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dpscope.reports.export import line_identity
from dpscope.reports.output import csv_output
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import traced_steps


def _lines(part: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    identity = line_identity(rows)
    for step in traced_steps(rows):
        whose = step.row.fields(*identity)
        parts: dict[str, Any] = {**step.trace}
        for line in parts.get(part, []):
            lines.append({**whose, **{key: round(v, 6) if isinstance(v, float) else v for key, v in line.items()}})
    return lines


TRACE_CSV = tuple(
    csv_output(f"trace_{part}.csv", f"all {part} of a step", partial(_lines, part), instrument="trace")
    for part in ("operators", "kernels")
)

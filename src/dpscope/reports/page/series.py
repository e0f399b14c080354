"""What charts across sizes share: how sizes are ordered, how a range reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpscope.reports.page.chart import Cell, Table
from dpscope.reports.tables import Row
from dpscope.reports.words import size_in_words

MOST = 3  # rows that a sentence names


def work_of(row: Row) -> tuple[int, int]:
    """Order of sizes along a line: tokens (or samples) of a step, then the sequence."""
    spec = row.first.spec
    length = spec.get("seq_len") or 1
    return spec["batch_size"] * length, length


def ranged(values: Iterable[float], read: Callable[[float], str]) -> str:
    """`1.02×`, or `1.02× to 1.31×`."""
    found = sorted(values)
    return " to ".join(dict.fromkeys((read(found[0]), read(found[-1]))))


def named(what: str, reasons: Sequence[tuple[Row, str]]) -> str:
    """A sentence that names some rows and why; the chart's table has them all. Nothing without any."""
    told = [f"{row.method} at {size_in_words(row.first.spec)} ({why})" for row, why in reasons[:MOST]]
    more = f" and {len(reasons) - MOST} more" if len(reasons) > MOST else ""
    return f" {what}: {', '.join(told)}{more}." if told else ""


def cost_table(rows: Sequence[Row]) -> Table:
    """Time and peak of every row, of those without figures too."""
    columns = ("model", "method", "batch_size", "seq_len", "dtype", "status", "median_ms", "peak_bytes")
    ratios = ("time_ratio_to_standard", "memory_ratio_to_standard", "time_doubt")
    return Table(columns=(*columns, *ratios), rows=list(map(_costs, rows)))


def _costs(row: Row) -> tuple[Cell, ...]:
    spec = row.first.spec
    what = (spec["workload"]["name"], row.method, spec["batch_size"], spec.get("seq_len"), spec.get("dtype"))
    costs = (row.median_ms, row.peak_bytes, row.time_ratio, row.memory_ratio, row.ratio_doubt or None)
    return *what, row.result.status, *costs

"""What charts across sizes share: how sizes are ordered, how a range reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpscope.reports.export import IDENTITY
from dpscope.reports.page.chart import Table
from dpscope.reports.tables import Row

NAMED_ROWS = 3  # rows that a sentence names


def work_of(row: Row) -> tuple[int, int]:
    """Order of sizes along a line: tokens (or samples) of a step, then the sequence."""
    length = row.spec.get("seq_len") or 1
    return row.samples * length, length


def ranged(values: Iterable[float], read: Callable[[float], str]) -> str:
    """`1.02×`, or `1.02× to 1.31×`."""
    found = sorted(values)
    return " to ".join(dict.fromkeys((read(found[0]), read(found[-1]))))


def named(what: str, reasons: Sequence[tuple[Row, str]]) -> str:
    """A sentence that names some rows and why; the chart's table has them all. Nothing without any."""
    told = [f"{row.method} at {row.size} ({why})" for row, why in reasons[:NAMED_ROWS]]
    more = f" and {len(reasons) - NAMED_ROWS} more" if len(reasons) > NAMED_ROWS else ""
    return f" {what}: {', '.join(told)}{more}." if told else ""


def cost_table(rows: Sequence[Row]) -> Table:
    """Time and peak of every row, of those without figures too."""
    costs = ("median_ms", "peak_bytes", "time_ratio_to_standard", "memory_ratio_to_standard", "time_doubt")
    return Table(
        columns=(*IDENTITY, "status", *costs),
        rows=[
            (
                *(*row.fields(*IDENTITY).values(), row.result.status, row.median_ms, row.peak_bytes),
                *(row.time_ratio, row.memory_ratio, row.ratio_doubt or None),
            )
            for row in rows
        ],
    )

"""Peak memory against time: every method at every size, as multiples of ordinary training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.doubt import EXPLAINED, marked
from dpscope.reports.page.chart import Chart, View
from dpscope.reports.page.looks import looks_of
from dpscope.reports.page.series import cost_table, named, ranged, work_of
from dpscope.reports.tables import Row
from dpscope.reports.words import size_in_words
from dpscope.units import format_bytes, format_ms, format_ratio
from dpscope.vocabulary.methods import STANDARD

NOT_SEEN = {
    True: "the noise and the privacy that are bought: those are the same for every private method",
    False: "how much of either is due to privacy, since there is no standard to divide by",
}


def tradeoff(rows: Sequence[Row]) -> Chart | None:
    """None unless two rows have both a time and a peak."""
    whole = [row for row in rows if row.median_ms and row.peak_bytes]
    compared = [row for row in whole if row.time_ratio is not None and row.memory_ratio is not None]
    relative = any(row.method != STANDARD for row in compared)
    drawn = compared if relative else whole
    if len(drawn) < 2:
        return None
    kept = {id(row) for row in drawn}
    return Chart(
        key="tradeoff",
        title="Memory against time",
        nav_label="Trade-off",
        kind="tradeoff",
        how=(
            "Median time of the timed steps and peak of allocated bytes"
            f"{', as multiples of those of standard at the same size' if relative else ''}; a line joins the sizes of "
            f"one method. It does not see {NOT_SEEN[relative]}."
        ),
        views=[
            View(
                size="",
                says=_says(drawn, relative=relative)
                + named("Not drawn", [(row, _why(row)) for row in rows if id(row) not in kept]),
                data={
                    "relative": relative,
                    "standard": {"method": STANDARD, **looks_of(rows)[STANDARD]} if relative else None,
                    "lines": _lines(drawn, rows, relative=relative),
                },
                table=cost_table(rows),
            )
        ],
    )


def _lines(drawn: Sequence[Row], rows: Sequence[Row], *, relative: bool) -> list[dict[str, Any]]:
    looks = looks_of(rows)
    others = [row for row in drawn if not (relative and row.method == STANDARD)]
    return [
        {
            "method": method,
            **looks[method],
            "points": [_point(row) for row in sorted(others, key=work_of) if row.method == method],
        }
        for method in dict.fromkeys(row.method for row in others)
    ]


def _point(row: Row) -> dict[str, Any]:
    spec = row.first.spec
    return {
        "size": size_in_words(spec),
        "short": "×".join(str(spec[name]) for name in ("batch_size", "seq_len") if spec.get(name)),
        "median_ms": row.median_ms,
        "spread_ms": row.spread_ms,
        "peak_bytes": row.peak_bytes,
        "time_ratio": row.time_ratio,
        "memory_ratio": row.memory_ratio,
        "doubt": EXPLAINED.get(row.ratio_doubt, ""),
    }


def _says(drawn: Sequence[Row], *, relative: bool) -> str:
    told = []
    for method in dict.fromkeys(row.method for row in drawn):
        own = [row for row in drawn if row.method == method]
        if relative and method != STANDARD:
            doubt = marked("", "".join(row.ratio_doubt for row in own))
            times = ranged((row.time_ratio or 0.0 for row in own), format_ratio)
            told.append(f"{method} {times} the time{doubt} and {_memory_ratios(own)} the memory")
        elif not relative:
            times = ranged((row.median_ms or 0.0 for row in own), format_ms)
            told.append(f"{method} {times} and {ranged((row.peak_bytes or 0.0 for row in own), format_bytes)}")
    sizes = len({size_in_words(row.first.spec) for row in drawn})
    where = f"Over {sizes} sizes" if sizes > 1 else "A step"
    return f"{where}{', against standard' if relative else ''}: {'; '.join(told)}."


def _memory_ratios(rows: Sequence[Row]) -> str:
    return ranged((row.memory_ratio or 0.0 for row in rows), format_ratio)


def _why(row: Row) -> str:
    if not row.result.ok:
        return row.result.status
    missing = "no time" if not row.median_ms else "no peak" if not row.peak_bytes else ""
    return missing or "no standard at this size"

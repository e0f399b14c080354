"""How much each figure of each row changed between two sweeps: a bar to the left for less, to the right for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.against.changes import MEMORY, RATIOS, TIME, Change, Figure
from dpscope.reports.against.data import Against, Pair
from dpscope.reports.against.words import format_change, name_of
from dpscope.reports.page.chart import Cell, Chart, Table, View

SMALLEST = 0.0005  # what rounds to nothing is not drawn
MOST = 24  # rows that can be told apart in one drawing: of more, those that changed most

HOW = {
    TIME.key: (
        "A bar is the change of the median; the line across it spans what the 10th to 90th percentiles of the steps, "
        "before and now, allow. It does not see how much two runs of the same program differ."
    ),
    MEMORY.key: (
        "A bar is the change of a step's peak, counted once in each sweep and in the same way in both. It does not see "
        "what the peak is made of: each sweep's own page has that."
    ),
}


def change_charts(against: Against) -> list[Chart]:
    """Of time and of memory, each where there is anything to be seen."""
    charts = []
    for figure in (TIME, MEMORY):
        pairs = [pair for pair in against.pairs if pair.changes[figure.key].relative is not None]
        if any(abs(_relative(pair, figure)) >= SMALLEST for pair in pairs):
            charts.append(_chart(against, figure, pairs))
    return charts


def _chart(against: Against, figure: Figure, pairs: Sequence[Pair]) -> Chart:
    drawn = sorted(pairs, key=lambda pair: -abs(_relative(pair, figure)))[:MOST]
    shown = [pair for pair in pairs if pair in drawn]  # in the table's order
    return Chart(
        key=f"{figure.key}-change",
        title=f"{figure.title}: change from before to now",
        nav_label=figure.title,
        kind="changes",
        how=HOW[figure.key],
        views=[
            View(
                size="",
                says=_says(against, figure, pairs, len(shown)),
                data={"unit": figure.unit, "bars": [_bar(against, figure, pair) for pair in shown]},
                table=_table(against, figure, pairs),
            )
        ],
    )


def _says(against: Against, figure: Figure, pairs: Sequence[Pair], shown: int) -> str:
    found = sorted((pair for pair in pairs if pair.changes[figure.key].found), key=lambda pair: _relative(pair, figure))
    left_out = f" The {shown} rows that changed most are drawn." if shown < len(pairs) else ""
    if not found:
        return f"{figure.title}: no row of {len(pairs)} changed.{left_out}"
    ends = [found[0]] if len(found) == 1 else [found[0], found[-1]]
    named = " to ".join(f"{format_change(_relative(pair, figure))} ({name_of(pair, against)})" for pair in ends)
    return f"{figure.title}: {len(found)} of {len(pairs)} rows changed, {named}.{left_out}"


def _relative(pair: Pair, figure: Figure) -> float:
    return pair.changes[figure.key].relative or 0.0


def _bar(against: Against, figure: Figure, pair: Pair) -> dict[str, Any]:
    change, ratio = pair.changes[figure.key], pair.changes[RATIOS[figure.key].key]
    ratios = "" if ratio.relative is None else f"{ratio.show(ratio.before)} → {ratio.show(ratio.now)}"
    return {
        "name": name_of(pair, against),
        "before": change.before.value,
        "now": change.now.value,
        "relative": change.relative,
        "range": change.range,
        "ratios": ratios,
        "verdict": change.verdict,
        "tone": {figure.less: "less", figure.more: "more"}.get(change.verdict, "none"),
    }


def _table(against: Against, figure: Figure, pairs: Sequence[Pair]) -> Table:
    def cells(change: Change) -> tuple[Cell, ...]:
        ends = change.range or (None, None)
        return (change.before.value, change.now.value, change.relative, *ends, change.verdict)

    values = (f"before_{figure.unit}", f"now_{figure.unit}", "change", "change_low", "change_high", "verdict")
    return Table(
        columns=("row", *values),
        rows=[(name_of(pair, against), *cells(pair.changes[figure.key])) for pair in pairs],
    )

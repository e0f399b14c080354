"""How much each quantity of each row changed between two sweeps: a bar to the left for less, to the right for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.against.data import Against, Pair
from dpscope.reports.against.quantities import QUANTITIES, Quantity
from dpscope.reports.against.words import arrow, format_change
from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.palette import LESS, MORE

TONES = {"less": LESS, "more": MORE}
SMALLEST_DRAWN = 0.0005  # what rounds to nothing is not drawn
DRAWN_ROWS = 24  # rows that can be told apart in one drawing: of more, those that changed most


def change_charts(against: Against) -> list[Chart]:
    """A chart of each quantity where there is anything to be seen."""
    return [chart for quantity in QUANTITIES if quantity.how and (chart := _chart(against, quantity))]


def _chart(against: Against, quantity: Quantity) -> Chart | None:
    pairs = [pair for pair in against.pairs if pair.change(quantity).relative is not None]
    most = sorted(pairs, key=lambda pair: -abs(_relative(pair, quantity)))[:DRAWN_ROWS]
    if not most or abs(_relative(most[0], quantity)) < SMALLEST_DRAWN:
        return None
    drawn = [pair for pair in pairs if pair in most]  # in the table's order
    view = View(
        says=_says(against, quantity, pairs, len(drawn)),
        data={"unit": quantity.unit, "tones": TONES, "bars": [_bar(against, quantity, pair) for pair in drawn]},
        table=_table(against, quantity, pairs),
    )
    return Chart(
        key=f"{quantity.key}-change",
        title=f"{quantity.title}: change from before to now",
        nav_label=quantity.title,
        kind="changes",
        how=quantity.how,
        views=[view],
    )


def _says(against: Against, quantity: Quantity, pairs: Sequence[Pair], drawn: int) -> str:
    found = [pair for pair in pairs if pair.change(quantity).tone]
    found.sort(key=lambda pair: _relative(pair, quantity))
    left_out = f" The {drawn} rows that changed most are drawn." if drawn < len(pairs) else ""
    if not found:
        return f"{quantity.title}: no row of {len(pairs)} changed.{left_out}"
    ends = [found[0]] if len(found) == 1 else [found[0], found[-1]]
    named = " to ".join(f"{format_change(_relative(pair, quantity))} ({against.name_of(pair)})" for pair in ends)
    return f"{quantity.title}: {len(found)} of {len(pairs)} rows changed, {named}.{left_out}"


def _relative(pair: Pair, quantity: Quantity) -> float:
    return pair.change(quantity).relative or 0.0


def _bar(against: Against, quantity: Quantity, pair: Pair) -> dict[str, Any]:
    change, ratio = pair.change(quantity), pair.ratio(quantity)
    return {
        "name": against.name_of(pair),
        "before": change.before.value,
        "now": change.now.value,
        "relative": change.relative,
        "range": change.range,
        "ratios": "" if ratio.relative is None else arrow(ratio),
        "verdict": change.verdict,
        "tone": change.tone or "none",
    }


def _table(against: Against, quantity: Quantity, pairs: Sequence[Pair]) -> Table:
    values = (f"before_{quantity.unit}", f"now_{quantity.unit}", "change", "change_low", "change_high", "verdict")
    changes = [(against.name_of(pair), pair.change(quantity)) for pair in pairs]
    return Table(
        columns=("row", *values),
        rows=[
            (name, each.before.value, each.now.value, each.relative, *(each.range or (None, None)), each.verdict)
            for name, each in changes
        ],
    )

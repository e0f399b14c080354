"""report-against.html: two sweeps side by side in the layout of report.html, with charts of what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpscope.reports.against.data import Against, Pair, list_rows
from dpscope.reports.against.quantities import QUANTITIES, Quantity
from dpscope.reports.against.text import AGAINST_TITLE, arrow, format_change, headline, sentences
from dpscope.reports.output import text_output
from dpscope.reports.page.chart import Chart, Table, View, chart_of
from dpscope.reports.page.render import GENERATOR, render_page, render_template
from dpscope.reports.palette import LESS, MORE
from dpscope.reports.report import Report

if TYPE_CHECKING:
    from markupsafe import Markup


TONES = {"less": LESS, "more": MORE}
SMALLEST_DRAWN = 0.0005  # what rounds to nothing is not drawn
DRAWN_ROWS = 24  # rows that can be told apart in one drawing: of more, those that changed most


def change_charts(against: Against) -> list[Chart]:
    """Return a chart of each quantity that has figures."""
    return [chart for quantity in QUANTITIES if quantity.how and (chart := _chart(against, quantity))]


def _chart(against: Against, quantity: Quantity) -> Chart | None:
    pairs = [pair for pair in against.pairs if pair.change(quantity).relative is not None]
    most = sorted(pairs, key=lambda pair: -abs(_relative(pair, quantity)))[:DRAWN_ROWS]
    if not most or abs(_relative(most[0], quantity)) < SMALLEST_DRAWN:
        return None
    bars, lines = [], []
    for pair in pairs:  # in the table's order
        name, change, ratio = against.name_of(pair), pair.change(quantity), pair.ratio(quantity)
        figures = {"before": change.before.value, "now": change.now.value, "relative": change.relative}
        lines.append((name, *figures.values(), *(change.range or (None, None)), change.verdict))
        ratios = "" if ratio.relative is None else arrow(ratio)
        told = {"ratios": ratios, "verdict": change.verdict, "tone": change.tone or "none"}
        bars += [{"name": name, **figures, "range": change.range, **told}] if pair in most else []
    sides = (f"before_{quantity.unit}", f"now_{quantity.unit}")
    view = View(
        says=_says(against, quantity, pairs, len(bars)),
        data={"unit": quantity.unit, "tones": TONES, "bars": bars},
        table=Table(columns=("row", *sides, "change", "change_low", "change_high", "verdict"), rows=lines),
    )
    title, key = f"{quantity.title}: change from before to now", f"{quantity.key}-change"
    return chart_of([view], key=key, title=title, nav_label=quantity.title, kind="changes", how=quantity.how)


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


def render_against(against: Against) -> str:
    rows = [*(pair.now for pair in against.pairs), *against.only_now]
    # Rows that only their numbers of steps keep apart share results.
    results = {id(result): result for row in rows for result in row.measured.values()}.values()
    title, section, charts = AGAINST_TITLE, _section(against), change_charts(against)
    return render_page(Report.of(results, against.skipped), title=title, before=[section], charts=charts)


def _section(against: Against) -> Markup:
    from markupsafe import Markup

    tables = []
    for quantity in against.quantities:
        rows = []
        for pair in against.pairs:
            change, verdict = pair.change(quantity), pair.verdict(quantity) or pair.now.result.status
            cells = [*change.shown, format_change(change.relative), *pair.ratio(quantity).shown]
            rows.append({"name": against.name_of(pair), "cells": cells, "verdict": verdict, "tone": change.tone})
        tables.append({"quantity": quantity, "rows": rows})
    alone = {"before": list_rows(against.only_before), "now": list_rows(against.only_now)}
    told = {"headline": headline(against), "sentences": sentences(against)}
    return Markup(render_template("against.html.jinja", against=against, tables=tables, alone=alone, **told))


AGAINST_PAGE = text_output("report-against.html", "the same as a page", render_against, mark=GENERATOR)

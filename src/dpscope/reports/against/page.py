"""report-against.html: two sweeps side by side, in the frame of the page of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpscope.reports.against.chart import change_charts
from dpscope.reports.against.data import Against, Pair, list_rows
from dpscope.reports.against.quantities import Quantity
from dpscope.reports.against.words import AGAINST_TITLE, format_change, headline, sentences
from dpscope.reports.output import text_output
from dpscope.reports.page.render import GENERATOR, render_page, render_template
from dpscope.reports.report import Report

if TYPE_CHECKING:
    from markupsafe import Markup


def render_against(against: Against) -> str:
    rows = [*(pair.now for pair in against.pairs), *against.only_now]
    # Rows that only their numbers of steps keep apart share results.
    results = {id(result): result for row in rows for result in row.measured.values()}.values()
    title, section, charts = AGAINST_TITLE, _section(against), change_charts(against)
    return render_page(Report.of(results, against.skipped), title=title, before=[section], charts=charts)


def _section(against: Against) -> Markup:
    from markupsafe import Markup

    tables = [
        {"quantity": quantity, "rows": [_line(pair, quantity, against) for pair in against.pairs]}
        for quantity in against.quantities
    ]
    alone = {"before": list_rows(against.only_before), "now": list_rows(against.only_now)}
    told = {"headline": headline(against), "sentences": sentences(against)}
    return Markup(render_template("against.html.jinja", against=against, tables=tables, alone=alone, **told))


def _line(pair: Pair, quantity: Quantity, against: Against) -> dict[str, Any]:
    change = pair.change(quantity)
    return {
        "name": against.name_of(pair),
        "cells": [*change.shown, format_change(change.relative), *pair.ratio(quantity).shown],
        "verdict": pair.verdict(quantity) or pair.now.result.status,
        "tone": change.tone,
    }


AGAINST_PAGE = text_output("report-against.html", "the same as a page", render_against, mark=GENERATOR)

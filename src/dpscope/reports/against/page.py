"""report-against.html: two sweeps side by side, in the frame of the page of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpscope.reports.against.changes import RATIOS, RULES, Figure
from dpscope.reports.against.chart import change_charts
from dpscope.reports.against.data import Against, Pair, list_rows
from dpscope.reports.against.words import AGAINST_TITLE, format_change, headline, name_of, sentences
from dpscope.reports.output import text_output
from dpscope.reports.page.render import GENERATOR, make_environment, render_page
from dpscope.reports.report import Report

if TYPE_CHECKING:
    from markupsafe import Markup


def render_against(against: Against) -> str:
    rows = [*(pair.now for pair in against.pairs), *against.only_now]
    # Rows that only their numbers of steps keep apart share results.
    results = list({id(result): result for row in rows for result in row.measured.values()}.values())
    title, section, charts = AGAINST_TITLE, _section(against), change_charts(against)
    return render_page(Report.of(results, against.skipped), title=title, before=[section], charts=charts)


def _section(against: Against) -> Markup:
    from markupsafe import Markup

    alone = {"before": list_rows(against.only_before), "now": list_rows(against.only_now)}
    return Markup(  # escaped by the template
        make_environment()
        .get_template("against.html.jinja")
        .render(
            against=against,
            headline=headline(against),
            sentences=sentences(against),
            tables=[_table(against, figure) for figure in against.figures],
            alone=alone,
        )
    )


def _table(against: Against, figure: Figure) -> dict[str, Any]:
    rows = [_cells(pair, figure, name_of(pair, against)) for pair in against.pairs]
    return {"title": figure.title, "rule": RULES[figure.key], "rows": rows}


def _cells(pair: Pair, figure: Figure, name: str) -> dict[str, Any]:
    change, ratio = pair.changes[figure.key], pair.changes[RATIOS[figure.key].key]
    tones = {figure.less: "less", figure.more: "more"}
    verdict = " → ".join(pair.statuses) if pair.status_changed else change.verdict or pair.now.result.status
    return {
        "name": name,
        "cells": [
            *(change.show(reading) for reading in (change.before, change.now)),
            format_change(change.relative),
            *(ratio.show(reading) for reading in (ratio.before, ratio.now)),
        ],
        "verdict": verdict,
        "tone": tones.get(change.verdict, ""),
    }


AGAINST_PAGE = text_output("report-against.html", "the same as a page", render_against, mark=GENERATOR)

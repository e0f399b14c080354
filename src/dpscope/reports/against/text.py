"""Two sweeps side by side: sentences and tables for the terminal and against.txt, and report-against.html."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from rich.console import Group, RenderableType
from rich.text import Text

from dpscope.plain_text import Column, FirstThatFits, table_of
from dpscope.reports.against.data import Against, Pair, list_rows
from dpscope.reports.against.quantities import MEMORY, QUANTITIES, TIME, UNDECIDED, Quantity, SweepChange
from dpscope.reports.looks import LESS, MORE, identity_columns, peak_notes, spread_in_words
from dpscope.reports.output import Output, text_output
from dpscope.reports.page.chart import Chart, Table, View, chart_of
from dpscope.reports.page.render import GENERATOR, render_page, render_template
from dpscope.reports.report import Report
from dpscope.reports.tables import ADVICE, EXPLAINED, explain
from dpscope.units import MISSING
from dpscope.vocabulary.methods import STANDARD

AGAINST_TITLE = "Two sweeps side by side"
SAME_SETTINGS = "Measured on the same machine with the same versions and settings."
NAMED_PAIRS = 8  # rows named one by one in a sentence; the table has all of them


def headline(against: Against) -> str:
    """Return the main point in one sentence."""
    rows = _count(len(against.pairs), "row")
    tallies = [
        f"{count} {word} {quantity.tally}".rstrip()
        for quantity in against.quantities
        for word in (quantity.less, quantity.more)
        if (count := sum(pair.change(quantity).verdict == word for pair in against.pairs))
    ]
    if statuses := sum(pair.status_changed for pair in against.pairs):
        tallies.append(f"{statuses} with another status")
    undecided = sum(not pair.changed and pair.change(TIME).verdict in UNDECIDED for pair in against.pairs)
    no_verdict = [f"{undecided} without a verdict on time"] if undecided else []
    if not tallies and undecided == len(against.pairs):
        return f"No verdict on the time of {rows} compared: nothing else changed."
    if not tallies:
        nothing = "Nothing is known to have changed" if undecided else "Nothing changed"
        return "; ".join([f"{nothing} in {rows} compared", *no_verdict]) + "."
    same = sum(not pair.changed for pair in against.pairs) - undecided
    return "; ".join([f"Of {rows} compared: {', '.join(tallies)}", *no_verdict, f"{same} without a change"]) + "."


def sentences(against: Against) -> list[str]:
    """Return everything that changed, the worst first; then what is undecided."""
    found = [_sentence(against, each, word) for each in against.quantities for word in (each.more, each.less)]
    others = [*_standard_sentences(against), *_undecided_sentences(against)]
    lines = []
    for pair in against.pairs:
        if pair.status_changed:
            before, now = pair.statuses
            reason = pair.now.result.reason or pair.before.result.reason
            lines.append(f"{against.name_of(pair)}: {before} before, {now} now" + (f" ({reason})" if reason else "."))
    return [*lines, *filter(None, found), *others]


def format_change(relative: float | None) -> str:
    """Return a change such as −3.1%, without a sign if it rounds to zero."""
    if relative is None:
        return MISSING
    share = f"{abs(relative):.1%}"
    sign = "" if share == "0.0%" else "−" if relative < 0 else "+"
    return sign + share


def arrow(change: SweepChange) -> str:
    return " → ".join(change.shown)


def _sentence(against: Against, quantity: Quantity, word: str) -> str:
    """Return `Faster: flash at batch 8 (174.4 ms → 111.9 ms, −35.9%; 1.73× → 1.11× of standard)`."""
    pairs = [pair for pair in against.pairs if pair.change(quantity).verdict == word]
    pairs.sort(key=lambda pair: -abs(pair.change(quantity).relative or 0.0))
    named = []
    for pair in pairs[:NAMED_PAIRS]:
        change, ratio = pair.change(quantity), pair.ratio(quantity)
        known = pair.now.method != STANDARD and ratio.relative is not None and ratio.verdict not in UNDECIDED
        of_standard = f"; {arrow(ratio)} of standard" if known else ""
        named.append(f"{against.name_of(pair)} ({arrow(change)}, {format_change(change.relative)}{of_standard})")
    more = [f"and {len(pairs) - NAMED_PAIRS} more"] if len(pairs) > NAMED_PAIRS else []
    return f"{word.capitalize()}{quantity.noun}: {'; '.join([*named, *more])}." if pairs else ""


def _standard_sentences(against: Against) -> list[str]:
    """Return a hint at the machine or the libraries, and at the ratios, if ordinary training changed."""
    moved = [pair for pair in against.pairs if pair.now.method == STANDARD and pair.change(TIME).tone]
    if not moved or len(moved) == len(against.pairs):
        return []
    others = [pair for pair in against.pairs if pair.now.method != STANDARD and pair.ratio(TIME).tone]
    named = "; ".join(f"{against.name_of(pair)} {arrow(pair.ratio(TIME))}" for pair in others[:NAMED_PAIRS])
    told = f"beyond the spread they changed for {named}" if others else "none of them changed beyond the spread"
    return [
        f"Ordinary training (standard) changed as well at {_count(len(moved), 'size')}, so some of it is the machine, "
        f"the libraries or the workload. The ratios to standard leave that out: {told}."
    ]


def _undecided_sentences(against: Against) -> list[str]:
    lines = []
    for verdict, why in EXPLAINED.items():
        if pairs := [pair for pair in against.pairs if pair.change(TIME).verdict == verdict]:
            everywhere = len(pairs) == len(against.pairs)
            names = "any row" if everywhere else "; ".join(against.name_of(pair) for pair in pairs[:NAMED_PAIRS])
            lines.append(f"No verdict on the time of {names}: {why}. {ADVICE[verdict]}.")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def against_summary(against: Against) -> RenderableType:
    """Return the differences between the machines, what changed, and the rule for changes."""
    headings = ("not the same", "before", "now")
    differences = table_of(
        against.differences, [(name, itemgetter(n)) for n, name in enumerate(headings)], left=headings, wrap=headings
    )
    parts: list[RenderableType] = [
        Text(AGAINST_TITLE, style="bold"),
        Text(f"before: {against.before}", no_wrap=True, overflow="ignore"),
        Text(f"now:    {against.now}", no_wrap=True, overflow="ignore"),
        *("", differences if differences.row_count else Text(SAME_SETTINGS), ""),
        Text(headline(against), style="bold"),
        *map(Text, sentences(against)),
    ]
    for quantity in against.quantities:
        parts += ["", Text(quantity.title, style="bold"), "", _tables(against.pairs, quantity), ""]
        parts += [Text(note, style="dim") for note in (quantity.rule, *_notes(against, quantity))]
    for label, rows in (("before", against.only_before), ("now", against.only_now)):
        parts += ["", Text(f"Only {label}: {list_rows(rows)}")] if rows else []
    if against.skipped:
        parts += ["", *(Text(f"Left out: {item.path}: {item.reason}", style="yellow") for item in against.skipped)]
    return Group(*parts)


def _notes(against: Against, quantity: Quantity) -> list[str]:
    """Return notes on what `?` marks and on how the peak was measured."""
    if quantity is MEMORY:
        return peak_notes(against.memory_sources)
    changes = [change for pair in against.pairs for change in (pair.change(quantity), pair.ratio(quantity))]
    note = explain(reading.doubt for change in changes for reading in (change.before, change.now))
    return [note] if note else []


def _tables(pairs: Sequence[Pair], quantity: Quantity) -> FirstThatFits:
    """Return a line a pair: before, now, the change, and the ratios to each sweep's own standard.

    A narrow terminal loses the spread first, then the ratios.
    """
    identity: list[Column[Pair]] = identity_columns([pair.now for pair in pairs], lambda pair: pair.now)

    figures: list[Column[Pair]] = [
        ("before", lambda pair: pair.change(quantity).shown[0]),
        ("p10–p90", lambda pair: spread_in_words(pair.change(quantity).before.spread)),
        ("now", lambda pair: pair.change(quantity).shown[1]),
        ("p10–p90", lambda pair: spread_in_words(pair.change(quantity).now.spread)),
        ("change", lambda pair: format_change(pair.change(quantity).relative)),
        ("× before", lambda pair: pair.ratio(quantity).shown[0]),
        ("× now", lambda pair: pair.ratio(quantity).shown[1]),
        ("", lambda pair: _verdict(pair, quantity)),
    ]
    spread, ratios, texts = {"p10–p90"}, {"× before", "× now"}, {"model", "method"}
    dropped = [set[str]() if quantity is TIME else spread, spread, spread | ratios]
    forms = [[*identity, *(column for column in figures if column[0] not in names)] for names in dropped]
    return FirstThatFits(lambda bars: (table_of(pairs, form, left={*texts, ""}, wrap=texts) for form in forms))


def _verdict(pair: Pair, quantity: Quantity) -> Text:
    verdict, change = pair.verdict(quantity), pair.change(quantity)
    style = {"less": "green", "more": "red"}.get(change.tone, "dim") if verdict == change.verdict else "red"
    return Text(verdict, style="bold" if pair.status_changed else style)


AGAINST_TEXT: Output[Against] = text_output("against.txt", "what changed between two sweeps", str, mark=AGAINST_TITLE)


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
        judged = {"ratios": ratios, "verdict": change.verdict, "tone": change.tone or "none"}
        bars += [{"name": name, **figures, "range": change.range, **judged}] if pair in most else []
    sides = (f"before_{quantity.unit}", f"now_{quantity.unit}")
    changed = [pair for pair in pairs if pair.change(quantity).tone]
    changed.sort(key=lambda pair: _relative(pair, quantity))
    ends = changed if len(changed) < 2 else [changed[0], changed[-1]]
    named = " to ".join(f"{format_change(_relative(pair, quantity))} ({against.name_of(pair)})" for pair in ends)
    told = f"{len(changed)} of {len(pairs)} rows changed, {named}" if changed else f"no row of {len(pairs)} changed"
    left_out = f" The {len(bars)} rows that changed most are drawn." if len(bars) < len(pairs) else ""
    view = View(
        says=f"{quantity.title}: {told}.{left_out}",
        data={"unit": quantity.unit, "tones": TONES, "bars": bars},
        table=Table(columns=("row", *sides, "change", "change_low", "change_high", "verdict"), rows=lines),
    )
    title, key = f"{quantity.title}: change from before to now", f"{quantity.key}-change"
    return chart_of([view], key=key, title=title, nav_label=quantity.title, kind="changes", how=quantity.how)


def _relative(pair: Pair, quantity: Quantity) -> float:
    return pair.change(quantity).relative or 0.0


def render_against(against: Against) -> str:
    from markupsafe import Markup

    own = [*(pair.now for pair in against.pairs), *against.only_now]
    # Rows that only their numbers of steps keep apart share results.
    results = {id(result): result for row in own for result in row.measured.values()}.values()
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
    section = Markup(render_template("against.html.jinja", against=against, tables=tables, alone=alone, **told))
    report, charts = Report.of(results, against.skipped), change_charts(against)
    return render_page(report, title=AGAINST_TITLE, before=[section], charts=charts)


AGAINST_PAGE = text_output("report-against.html", "the same as a page", render_against, mark=GENERATOR)

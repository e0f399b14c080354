"""Two sweeps side by side on a terminal, and in against.txt."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import render_plain
from dpscope.reports.against.changes import MEMORY, RATIOS, RULES, TIME, Change, Figure, Reading
from dpscope.reports.against.data import Against, Pair, list_rows
from dpscope.reports.against.words import AGAINST_TITLE, format_change, headline, sentences
from dpscope.reports.bars import FirstThatFits
from dpscope.reports.doubt import explain
from dpscope.reports.output import text_output
from dpscope.reports.tables import worth_a_column
from dpscope.reports.words import peak_notes, shorten
from dpscope.units import MISSING
from dpscope.vocabulary.settings import COMPARED, SETTINGS

LONGEST_NAME = 24


def against_summary(against: Against) -> RenderableType:
    """What differs about the machines, what changed, and by which rule."""
    parts: list[RenderableType] = [
        Text(AGAINST_TITLE, style="bold"),
        Text(f"before: {against.before}", no_wrap=True, overflow="ignore"),
        Text(f"now:    {against.now}", no_wrap=True, overflow="ignore"),
        "",
        *_differences(against),
        "",
        Text(headline(against), style="bold"),
        *(Text(sentence) for sentence in sentences(against)),
    ]
    for figure in against.figures:
        parts += ["", Text(figure.title, style="bold"), "", _tables(against, figure)]
        parts += ["", *(Text(note, style="dim") for note in (RULES[figure.key], *_notes(against, figure)))]
    for label, rows in (("before", against.only_before), ("now", against.only_now)):
        if rows:
            parts += ["", Text(f"Only {label}: {list_rows(rows)}")]
    if against.skipped:
        parts += ["", *(Text(f"Left out: {item.path}: {item.reason}", style="yellow") for item in against.skipped)]
    return Group(*parts)


def _notes(against: Against, figure: Figure) -> list[str]:
    """What `?` marks, and which peak it is."""
    if figure is MEMORY:
        return peak_notes(against.memory_sources)
    changes = [pair.changes[key] for pair in against.pairs for key in (figure.key, RATIOS[figure.key].key)]
    note = explain(reading.doubt for change in changes for reading in (change.before, change.now))
    return [note] if note else []


def _differences(against: Against) -> list[RenderableType]:
    if not against.differences:
        return [Text("Measured on the same machine with the same versions and settings.")]
    table = _columns("not the same", "before", "now")
    for each in against.differences:
        table.add_row(each.name, Text(each.before), Text(each.now))
    return [table]


def _columns(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading)
    return table


def _tables(against: Against, figure: Figure) -> FirstThatFits:
    """On a narrow terminal the spread goes first, then the ratios."""
    wanted = [(figure is TIME, True), (False, True), (False, False)]
    return FirstThatFits([_table(against, figure, spread=spread, ratios=ratios) for spread, ratios in wanted])


def _table(against: Against, figure: Figure, *, spread: bool, ratios: bool) -> Table:
    """A row a pair: before, now, the change, and the ratios to each sweep's own standard."""
    rows = [pair.now for pair in against.pairs]
    extra = worth_a_column(rows, COMPARED)
    several = len({row.first.spec["workload"]["name"] for row in rows}) > 1
    sequences = any(row.first.spec["seq_len"] for row in rows)
    table = _columns(*(["model"] if several else []), "method")
    sides = [heading for side in ("before", "now") for heading in (side, *(["p10–p90"] if spread else []))]
    for heading in (
        "batch",
        *(["seq"] if sequences else []),
        *(SETTINGS[name].column for name in extra),
        *sides,
        "change",
        *(["× before", "× now"] if ratios else []),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for pair in against.pairs:
        spec, change, ratio = pair.now.first.spec, pair.changes[figure.key], pair.changes[RATIOS[figure.key].key]
        cells: list[RenderableType] = [Text(spec["workload"]["name"])] if several else []
        cells += [Text(shorten(pair.now.method, LONGEST_NAME)), str(spec["batch_size"])]
        cells += [str(spec["seq_len"] or MISSING)] if sequences else []
        cells += [pair.now.cell(name) for name in extra]
        for reading in (change.before, change.now):
            cells += [change.show(reading), *([_spread(reading)] if spread else [])]
        cells += [format_change(change.relative)]
        cells += [ratio.show(each) for each in (ratio.before, ratio.now)] if ratios else []
        table.add_row(*cells, _verdict(pair, change))
    return table


def _spread(reading: Reading) -> str:
    return MISSING if reading.spread is None else "–".join(f"{end:.1f}" for end in reading.spread)


def _verdict(pair: Pair, change: Change) -> Text:
    if pair.status_changed:
        return Text(" → ".join(pair.statuses), style="bold")
    if not pair.now.result.ok:
        return Text(pair.now.result.status, style="red")
    styles = {change.figure.less: "green", change.figure.more: "red"}
    return Text(change.verdict, style=styles.get(change.verdict, "dim"))


def _against_text(against: Against) -> str:
    return render_plain(against_summary(against))


AGAINST_TEXT = text_output("against.txt", "what changed between two sweeps", _against_text, mark=AGAINST_TITLE)

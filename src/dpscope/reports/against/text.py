"""Two sweeps side by side on a terminal, and in against.txt."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import render_plain
from dpscope.reports.against.data import Against, Pair, list_rows
from dpscope.reports.against.quantities import MEMORY, TIME, Quantity, Reading
from dpscope.reports.against.words import AGAINST_TITLE, format_change, headline, sentences
from dpscope.reports.bars import FirstThatFits
from dpscope.reports.doubt import explain
from dpscope.reports.output import text_output
from dpscope.reports.tables import SIZES, heading_of, worth_a_column
from dpscope.reports.text_table import field_cells
from dpscope.reports.words import peak_notes
from dpscope.units import MISSING
from dpscope.vocabulary.settings import COMPARED

SIDES = ("before", "now")
STYLES = {"less": "green", "more": "red"}


def against_text(against: Against) -> str:
    return render_plain(against_summary(against))


def against_summary(against: Against) -> RenderableType:
    """What differs about the machines, what changed, and by which rule."""
    parts: list[RenderableType] = [
        Text(AGAINST_TITLE, style="bold"),
        Text(f"before: {against.before}", no_wrap=True, overflow="ignore"),
        Text(f"now:    {against.now}", no_wrap=True, overflow="ignore"),
        "",
        _differences(against),
        "",
        Text(headline(against), style="bold"),
        *(Text(sentence) for sentence in sentences(against)),
    ]
    for quantity in against.quantities:
        # On a narrow terminal the spread goes first, then the ratios.
        wanted = [(quantity is TIME, True), (False, True), (False, False)]
        tables = [_table(against.pairs, quantity, spread=spread, ratios=ratios) for spread, ratios in wanted]
        parts += ["", Text(quantity.title, style="bold"), "", FirstThatFits(tables), ""]
        parts += [Text(note, style="dim") for note in (quantity.rule, *_notes(against, quantity))]
    for label, rows in (("before", against.only_before), ("now", against.only_now)):
        if rows:
            parts += ["", Text(f"Only {label}: {list_rows(rows)}")]
    if against.skipped:
        parts += ["", *(Text(f"Left out: {item.path}: {item.reason}", style="yellow") for item in against.skipped)]
    return Group(*parts)


def _notes(against: Against, quantity: Quantity) -> list[str]:
    """What `?` marks, and which peak it is."""
    if quantity is MEMORY:
        return peak_notes(against.memory_sources)
    changes = [change for pair in against.pairs for change in (pair.change(quantity), pair.ratio(quantity))]
    note = explain(reading.doubt for change in changes for reading in (change.before, change.now))
    return [note] if note else []


def _differences(against: Against) -> RenderableType:
    if not against.differences:
        return Text("Measured on the same machine with the same versions and settings.")
    table = Table("not the same", "before", "now", box=None, pad_edge=False, header_style="bold")
    for each in against.differences:
        table.add_row(*map(Text, (each.name, each.before, each.now)))
    return table


def _table(pairs: Sequence[Pair], quantity: Quantity, *, spread: bool, ratios: bool) -> Table:
    """A row a pair: before, now, the change, and the ratios to each sweep's own standard."""
    names = worth_a_column([pair.now for pair in pairs], ("model", "method", *SIZES, *COMPARED))
    lines = [_line(pair, names, quantity, spread=spread, ratios=ratios) for pair in pairs]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, _ in lines[0]:
        is_text = heading in ("model", "method", "")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading not in ("model", "method"))
    for line in lines:
        table.add_row(*(cell for _, cell in line))
    return table


def _line(
    pair: Pair, names: Sequence[str], quantity: Quantity, *, spread: bool, ratios: bool
) -> list[tuple[str, RenderableType]]:
    """Headings, and the cells below them."""
    change, fields = pair.change(quantity), map(Text, field_cells(pair.now, names))
    cells: list[tuple[str, RenderableType]] = list(zip(map(heading_of, names), fields, strict=True))
    for heading, reading, text in zip(SIDES, (change.before, change.now), change.shown, strict=True):
        cells += [(heading, text), *([("p10–p90", _spread(reading))] if spread else [])]
    cells.append(("change", format_change(change.relative)))
    if ratios:
        cells += [(f"× {side}", text) for side, text in zip(SIDES, pair.ratio(quantity).shown, strict=True)]
    return [*cells, ("", _verdict(pair, quantity))]


def _spread(reading: Reading) -> str:
    return MISSING if reading.spread is None else "–".join(f"{end:.1f}" for end in reading.spread)


def _verdict(pair: Pair, quantity: Quantity) -> Text:
    verdict, change = pair.verdict(quantity), pair.change(quantity)
    style = STYLES.get(change.tone, "dim") if verdict == change.verdict else "red"
    return Text(verdict, style="bold" if pair.status_changed else style)


AGAINST_TEXT = text_output("against.txt", "what changed between two sweeps", against_text, mark=AGAINST_TITLE)

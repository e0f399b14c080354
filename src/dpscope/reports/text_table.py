"""Tables of text as the sections of a summary show them. A column is a heading and what it shows of an item."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.table import Table

from dpscope.reports.tables import Row
from dpscope.reports.words import shorten

Item = TypeVar("Item")
LONGEST_METHOD = 24  # characters of a method


def bare_table(*headings: str, left: Collection[str] = ()) -> Table:
    """Columns without lines between them: the first and those of `left` are text, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 or heading in left else "right", no_wrap=True)
    return table


def table_of(
    groups: Iterable[Sequence[Item]], columns: Mapping[str, Callable[[Item], str]], *, left: Collection[str] = ()
) -> Table:
    """A line for each item of each group."""
    table = bare_table(*columns, left=left)
    for group in groups:
        for item in group:
            table.add_row(*(cell(item) for cell in columns.values()), end_section=item is group[-1])
    return table


def field_cells(row: Row, names: Sequence[str]) -> list[str]:
    """Fields of a row as a table shows them, a long method shortened."""
    return [shorten(row.cell(name), LONGEST_METHOD) if name == "method" else row.cell(name) for name in names]

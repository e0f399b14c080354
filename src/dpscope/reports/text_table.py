"""The first columns of a table of text: what tells its rows apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from dpscope.plain_text import Column, Item
from dpscope.reports.tables import Row, heading_of, worth_a_column
from dpscope.reports.words import shorten
from dpscope.vocabulary.settings import COMPARED

LONGEST_METHOD = 24  # characters
NUMBERS = {"batch": 5, "seq": 3, "warmup": 6, "steps": 5}  # fields that are, and the least that their columns take


def identity_columns(
    rows: Sequence[Row], row_of: Callable[[Item], Row], more: Sequence[str] = ()
) -> list[Column[Item]]:
    """Return the fields that tell the rows of some items apart, a long method shortened; `more`: other fields too."""

    def column(name: str) -> Column[Item]:
        longest = LONGEST_METHOD if name == "method" else 10**6
        return heading_of(name), lambda item: Text(shorten(row_of(item).cell(name), longest))

    names = worth_a_column(rows, ("model", "method", "batch_size", "seq_len", *COMPARED, *more))
    return [column(name) for name in names]

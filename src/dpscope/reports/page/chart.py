"""What a chart of the page is: data in Python, drawn in the browser by the function of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Cell = str | float | int | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """The same figures as rows of text and numbers: for the CSV button, and for whoever cannot see a drawing.

    Units are in the columns' names; numbers are not rounded.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class View:
    """A chart at one size. `data`: what the drawing function of the chart's kind reads; numbers in bytes and ms."""

    size: str  # `size_in_words`, or "" for a chart that spans all sizes
    says: str  # what is to be seen, in a sentence with numbers: also the drawing's description for a screen reader
    data: dict[str, Any]
    table: Table
    # Filled in by `make_charts` where the page has several settings: which, and what it is called and how it was
    # measured there if that is not as in the chart.
    setting: str = ""
    title: str = ""
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    key: str  # unique in the page: its anchor, and the name of the files it can be saved as
    title: str
    kind: str  # static/drawings/KIND.js draws it
    how: str  # how it was measured, and what it does not see: one sentence of each
    short: str  # a word or two, for the way to it
    views: Sequence[View]  # the reader chooses one; those of a size without figures are left out

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

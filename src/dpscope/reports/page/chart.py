"""Chart of the page: data in Python, drawn in the browser by the function of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpscope.reports.tables import Row, group_by_size

TableValue = str | float | int | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """The same figures as rows of text and numbers: for the CSV button, and for readers who cannot see a drawing.

    Units are in the columns' names; numbers are not rounded.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[TableValue]]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, TableValue]]) -> Table:
        """Return a row a record; all have the columns of the first."""
        return cls(columns=list(records[0]), rows=[list(record.values()) for record in records])


@dataclass(frozen=True, kw_only=True)
class View:
    """A chart at one size. `data`: what the drawing function of the chart's kind reads; numbers in bytes and ms."""

    says: str  # what is to be seen, in a sentence with numbers: also the drawing's description for a screen reader
    data: dict[str, Any]
    table: Table
    size: str = ""  # in words; "" for a chart that spans all sizes
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
    nav_label: str  # a word or two, for the links at the top of the page
    views: Sequence[View]  # the reader chooses one; those of a size without figures are left out

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON. Figures are not copied, as `asdict` would: there are many."""
        views = [{**vars(view), "table": vars(view.table)} for view in self.views]
        return {**vars(self), "views": views}


ViewOf = Callable[[Sequence[Row]], View | None]  # of rows that are compared with each other
ChartOf = Callable[[Sequence[Row]], Chart | None]  # None where no row has figures for it


def chart_of(
    views: Iterable[View | None], *, key: str, title: str, how: str, nav_label: str, kind: str = ""
) -> Chart | None:
    """Make a chart of views; None without a view. `kind` defaults to the key."""
    found = [view for view in views if view]
    return Chart(key=key, title=title, kind=kind or key, how=how, nav_label=nav_label, views=found) if found else None


def chart_by_size(*, key: str, title: str, nav_label: str, how: str, kind: str = "") -> Callable[[ViewOf], ChartOf]:
    """Make a chart with a view of each size from a function of the rows that are compared with each other.

    `how` is text of the page: how it was measured, and what it does not see.
    """

    def chart(view_of: ViewOf) -> ChartOf:
        def make(rows: Sequence[Row]) -> Chart | None:
            views = [replace(view, size=group[0].size) for group in group_by_size(rows) if (view := view_of(group))]
            return chart_of(views, key=key, title=title, nav_label=nav_label, how=how, kind=kind)

        return make

    return chart

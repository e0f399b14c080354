"""Tables of text as the sections of a summary show them, and small bars for ratios where a terminal has room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import bare_table
from dpscope.reports.tables import Row, heading_of, worth_a_column
from dpscope.reports.words import shorten
from dpscope.vocabulary.settings import COMPARED

Item = TypeVar("Item")
Column = tuple[str, Callable[[Item], RenderableType]]  # a heading, and what stands below it for an item
LONGEST_METHOD = 24  # characters
NUMBERS = {"batch": 5, "seq": 3, "warmup": 6, "steps": 5}  # fields that are, and the least that their columns take
LONGEST_BAR, SHORTEST_BAR = 10, 4  # cells
EIGHTHS = " ▏▎▍▌▋▊▉█"
# What fills the part that ordinary training costs as well, and what is beyond it.
BLOCKS, ASCII = ("▒", EIGHTHS), ("-", " #")
BARS_NOTE = "Bars: shaded up to 1.00× (standard), solid beyond; all solid where it is less."


def table_of(
    items: Iterable[Item],
    columns: Sequence[Column[Item]],
    *,
    left: Collection[str] = (),
    wrap: Collection[str] = (),
    least: Mapping[str, int] | None = None,
) -> Table:
    """A line for each item."""
    table = bare_table(*(heading for heading, _ in columns), left=left, wrap=wrap, least=least)
    for item in items:
        table.add_row(*(cell(item) for _, cell in columns))
    return table


def identity_columns(
    rows: Sequence[Row], row_of: Callable[[Item], Row], more: Sequence[str] = ()
) -> list[Column[Item]]:
    """The fields that tell the rows of some items apart, a long method shortened; `more`: other fields too."""

    def column(name: str) -> Column[Item]:
        longest = LONGEST_METHOD if name == "method" else 10**6
        return heading_of(name), lambda item: Text(shorten(row_of(item).cell(name), longest))

    names = worth_a_column(rows, ("model", "method", "batch_size", "seq_len", *COMPARED, *more))
    return [column(name) for name in names]


@dataclass(frozen=True)
class Bars:
    """How long a ratio is drawn: one scale for all bars of a table. Without cells there are none."""

    cells: int = 0
    largest: float = 1.0
    ascii_only: bool = False

    @property
    def one(self) -> float:
        """Cells for 1.00×: whole ones wherever the largest ratio leaves room for that, so that the mark is sharp."""
        exact = self.cells / self.largest
        return float(int(exact)) if exact >= 1 else exact

    def column(self, ratio: Callable[[Item], float | None]) -> list[Column[Item]]:
        """Nothing where there are no bars."""
        return [("", lambda item: self.draw(ratio(item)))] if self.cells else []

    def draw(self, ratio: float | None) -> Text:
        if ratio is None:
            return Text()
        shade, solid = ASCII if self.ascii_only else BLOCKS
        one, length = self.one, ratio * self.one
        if round(ratio, 2) < 1:  # as it is printed
            return Text(_fill(length, solid), style="green")
        shaded = int(one)
        return Text.assemble((shade * shaded, "bright_black"), (_fill(length - shaded, solid), "cyan"))


def _fill(cells: float, ramp: str) -> str:
    """Whole cells, and a part of one as finely as the characters allow."""
    finest = len(ramp) - 1
    whole, part = divmod(round(cells * finest), finest)
    return ramp[-1] * whole + (ramp[part] if part else "")


@dataclass(frozen=True)
class FirstThatFits:
    """The first of some tables whose text is not cut; the last if none is. With bars, as long as there is room for, on
    a terminal, where there are ratios to draw."""

    tables: Callable[[Bars], Iterable[Table]]  # the preferred first
    ratios: Sequence[float | None] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        largest = max((ratio for ratio in self.ratios if ratio is not None), default=0.0)
        drawn = console.is_terminal and not console.is_dumb_terminal and largest
        lengths = range(LONGEST_BAR, SHORTEST_BAR - 1, -2) if drawn else ()
        for bars in (*(Bars(cells, max(largest, 1.0), options.ascii_only) for cells in lengths), Bars()):
            for table in self.tables(bars):
                if Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width:
                    yield table
                    if bars.cells:
                        yield Text(f"\n{BARS_NOTE}", style="dim")
                    return
        yield table

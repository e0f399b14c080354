"""A small bar for each ratio of a table, where a terminal has room for it. Files and pipes get none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
LONGEST_BAR, SHORTEST_BAR = 10, 4  # cells
EIGHTHS = " ▏▎▍▌▋▊▉█"
# What fills the part that ordinary training costs as well, and what is beyond it.
BLOCKS, ASCII = ("▒", EIGHTHS), ("-", " #")
BARS_NOTE = "Bars: shaded up to 1.00× (standard), solid beyond; all solid where it is less."


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

    def column(self, ratio: Callable[[Item], float | None]) -> list[tuple[str, Callable[[Item], Text]]]:
        """A heading and what stands below it for an item; nothing where there are no bars."""
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
class WithBars:
    """The first of some tables that fits; on a terminal that is wide enough with bars, as long as there is room for."""

    makes: Sequence[Callable[[Bars], Table]]  # the preferred first
    ratios: Sequence[float | None]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        largest = max((ratio for ratio in self.ratios if ratio is not None), default=0.0)
        bars = []
        if console.is_terminal and not console.is_dumb_terminal and largest:
            bars = [
                Bars(cells, max(largest, 1.0), options.ascii_only) for cells in range(LONGEST_BAR, SHORTEST_BAR - 1, -2)
            ]
        for chosen in (*bars, Bars()):
            for make in self.makes:
                if _fits(table := make(chosen), console, options):
                    yield table
                    if chosen.cells:
                        yield Text(f"\n{BARS_NOTE}", style="dim")
                    return
        yield self.makes[-1](Bars())


@dataclass(frozen=True)
class FirstThatFits:
    """The first of some tables whose text is not cut; the last if none is."""

    tables: Iterable[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *preferred, last = self.tables
        yield next((table for table in preferred if _fits(table, console, options)), last)


def _fits(table: Table, console: Console, options: ConsoleOptions) -> bool:
    unlimited = options.update(max_width=10_000)
    return Measurement.get(console, unlimited, table).maximum <= options.max_width

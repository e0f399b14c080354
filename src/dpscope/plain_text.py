"""Text for a terminal: tables, small bars for ratios where there is room, and all of it as plain text."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
Column = tuple[str, Callable[[Item], RenderableType]]  # a heading, and what stands below it for an item
SUMMARY_WIDTH = 110
LONGEST_BAR, SHORTEST_BAR = 10, 4  # cells
EIGHTHS = " ▏▎▍▌▋▊▉█"
# What fills the part that ordinary training costs as well, and what is beyond it.
BLOCKS, ASCII = ("▒", EIGHTHS), ("-", " #")
BARS_NOTE = "Bars: shaded up to 1.00× (standard), solid beyond; all solid where it is less."


def render_plain(renderable: RenderableType, width: int = SUMMARY_WIDTH) -> str:
    """Return the same without colours or terminal control."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,  # in a notebook rich would display it and write nothing
        markup=False,
    )
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def bare_table(
    *headings: str, left: Collection[str] = (), wrap: Collection[str] = (), least: Mapping[str, int] | None = None
) -> Table:
    """Return a table without lines: the first column and those of `left` are text, the others numbers.

    `wrap`: columns that may be broken into lines; `least`: the least width of a column, in cells.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        justify: JustifyMethod = "left" if place == 0 or heading in left else "right"
        width = least.get(heading) if least else None
        broken: OverflowMethod = "fold" if heading in wrap else "ellipsis"
        table.add_column(heading, justify=justify, no_wrap=heading not in wrap, overflow=broken, min_width=width)
    return table


def table_of(
    items: Iterable[Item],
    columns: Sequence[Column[Item]],
    *,
    left: Collection[str] = (),
    wrap: Collection[str] = (),
    least: Mapping[str, int] | None = None,
) -> Table:
    """Return a line for each item."""
    table = bare_table(*(heading for heading, _ in columns), left=left, wrap=wrap, least=least)
    for item in items:
        table.add_row(*(cell(item) for _, cell in columns))
    return table


@dataclass(frozen=True)
class Bars:
    """Scale of a table's bars: how long a ratio is drawn. Without cells there are none."""

    cells: int = 0
    largest: float = 1.0
    ascii_only: bool = False

    @property
    def one(self) -> float:
        """Cells for 1.00×, a whole number of them if there is room, so that the mark is sharp."""
        exact = self.cells / self.largest
        return float(int(exact)) if exact >= 1 else exact

    def column(self, ratio: Callable[[Item], float | None]) -> list[Column[Item]]:
        """Return the column of bars; nothing if there are none."""
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
    """Return a bar of whole cells and a partial one, as finely as the characters allow."""
    finest = len(ramp) - 1
    whole, part = divmod(round(cells * finest), finest)
    return ramp[-1] * whole + (ramp[part] if part else "")


@dataclass(frozen=True)
class FirstThatFits:
    """The first of some tables that fits without cutting text; the last one if none fits.

    On a terminal with room it has bars for the ratios.
    """

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


def as_json(value: Any) -> str:
    """Return JSON in which null stands for inf and NaN."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with None for every float that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

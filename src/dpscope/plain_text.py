"""What is made for a terminal: tables, and all of it as plain text for files, pipes and `print()`."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping

from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table

SUMMARY_WIDTH = 110


def render_plain(renderable: RenderableType, width: int = SUMMARY_WIDTH) -> str:
    """The same without colours or terminal control."""
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
    """Columns without lines between them: the first and those of `left` are text, the others numbers. `wrap`: those
    that may be broken into lines; `least`: cells that a column takes at least."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        justify: JustifyMethod = "left" if place == 0 or heading in left else "right"
        width = least.get(heading) if least else None
        broken: OverflowMethod = "fold" if heading in wrap else "ellipsis"
        table.add_column(heading, justify=justify, no_wrap=heading not in wrap, overflow=broken, min_width=width)
    return table

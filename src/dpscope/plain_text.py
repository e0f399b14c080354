"""What is made for a terminal, as plain text: for files, pipes and `print()`."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

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

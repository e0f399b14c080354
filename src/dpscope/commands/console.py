"""Console of the commands: the terminal at its own width, or plain text of a fixed width into a pipe."""

import codecs
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dpscope.plain_text import SUMMARY_WIDTH

# For terminals that are not in Unicode: what says the same there.
PLAIN = {"×": "x", "–": "-", "—": "-", "−": "-", "→": "->", "…": "...", "≈": "~", "·": ".", "≥": ">=", "’": "'"}


class PipeConsole(Console):
    """A console that raises `BrokenPipeError` when its reader is gone, so that callers can react."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console() -> Console:
    codecs.register_error("dpscope.plain", _say_plainly)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="dpscope.plain")
    # No markup: `[triton]` in a remedy or a module's name is text, not a style.
    console = PipeConsole(markup=False)
    return console if console.is_terminal else PipeConsole(width=SUMMARY_WIDTH, color_system=None, markup=False)


def files_written(files: Sequence[Path]) -> str:
    return "\n".join(["Written:", *(f"  {path}" for path in files)])


def name_files(console: Console, files: Sequence[Path]) -> None:
    """Print every file that was written, and last the one to open."""
    console.print(f"\n{files_written(files)}", highlight=False, soft_wrap=True)
    for page in (path for path in files if path.suffix == ".html"):
        console.print(Text(f"\nOpen: {page}", style="bold"), soft_wrap=True)


def _say_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end

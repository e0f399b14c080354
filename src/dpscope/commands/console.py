"""Where commands print: the terminal at its own width, or plain text of a fixed width into a pipe."""

from rich.console import Console

from dpscope.reports.text import SUMMARY_WIDTH


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=SUMMARY_WIDTH, color_system=None)

"""`dpscope report DIR`: results that exist, shown again and turned into files."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from dpscope.commands.console import make_console
from dpscope.comparison import Comparison
from dpscope.errors import UserError
from dpscope.reports.figures import parse_formats
from dpscope.reports.outputs import write_reports
from dpscope.reports.text import files_written, summary


@click.command(name="report")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where to write [default: DIR].")
@click.option("--format", "formats", default="png", show_default=True, help="Of the figures, as png,svg,pdf.")
@click.option("--csv", is_flag=True, help="Also results.csv (a line for each method and size) and timeline.csv.")
@click.option("--latex", is_flag=True, help="Also results.tex: tables for a paper, with booktabs.")
def command(folder: Path, out: Path | None, formats: str, csv: bool, latex: bool) -> None:
    """Show the results in DIR again, and write summary and figures. Reads results and measures nothing.

    \b
    dpscope report sweep
    dpscope report sweep --out paper --format pdf --latex --csv

    Files in DIR that are no results are named, and the rest is reported.
    """
    kinds = parse_formats(formats)
    comparison = Comparison.read(folder)
    console = make_console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(comparison.results, comparison.skipped, width=console.width))
    tables = [name for name, wanted in (("csv", csv), ("latex", latex)) if wanted]
    try:
        files = write_reports(
            comparison.results, out or folder, skipped=comparison.skipped, formats=kinds, tables=tables
        )
    except UserError as error:
        if out or tables:
            raise
        say(f"\nNothing written: {error}")  # the results may lie where only reading is allowed
    else:
        say(f"\n{files_written(files)}")
    sys.exit(0 if comparison.ok else 1)

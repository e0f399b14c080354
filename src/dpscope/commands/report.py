"""`dpscope report DIR`: results that exist, shown again and turned into files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from dpscope.commands.options import CommaList
from dpscope.commands.sweeping import make_console, name_files
from dpscope.comparison import Comparison
from dpscope.endings import leave
from dpscope.errors import UserError
from dpscope.packages import REPORTING, TABLE_PACKAGES, require
from dpscope.reports.against.data import Against
from dpscope.reports.against.quantities import QUANTITIES
from dpscope.reports.against.text import against_summary
from dpscope.reports.drawing import FORMATS
from dpscope.reports.outputs import write_against, write_reports


@click.command(name="report")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="DIR_B",
    type=click.Path(path_type=Path),
    help="Say what changed from the sweep in DIR_B (before) to the one in DIR (now), instead.",
)
@click.option(
    "--fail-on",
    "fail_on",
    type=CommaList(str),
    help="With --against: exit with 1 where a row is so, as slower,larger,status; no verdict counts as none.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where to write [default: DIR].")
@click.option("--format", "formats", default="png", show_default=True, help="Of the figures, as png,svg,pdf.")
@click.option("--csv", is_flag=True, help="Also results.csv (a line for each method and size) and timeline.csv.")
@click.option("--latex", is_flag=True, help="Also results.tex: tables for a paper, with booktabs.")
@click.pass_context
def command(
    context: click.Context,
    folder: Path,
    against: Path | None,
    fail_on: list[str] | None,
    out: Path | None,
    formats: str,
    csv: bool,
    latex: bool,
) -> None:
    """Show the results in DIR again, and write summary and figures. Reads results and measures nothing.

    \b
    dpscope report sweep
    dpscope report sweep --out paper --format pdf --latex --csv
    dpscope report new --against old

    With --against: before and after a change, two GPUs, two versions of torch. DIR_B is the reference. Writes
    report-against.html and against.txt (and against.csv with --csv); the reports of each sweep stay as they are.

    Files in DIR that are no results are named, and the rest is reported; the exit code is then 1.
    """
    require(*REPORTING, *(TABLE_PACKAGES if csv or latex else ()))
    console = make_console()
    kinds = parse_formats(formats)
    comparison = Comparison.read(folder)
    failed: list[str] = []
    write: Callable[[Path], list[Path]]
    wishes = [name for name, wanted in (("csv", csv), ("latex", latex)) if wanted]
    if against is not None:
        if latex or context.get_parameter_source("formats") is ParameterSource.COMMANDLINE:
            raise UserError("--latex and --format are of one sweep: leave them out, or leave out --against")
        change = comparison.against(against)
        failed = failing_rows(change, fail_on or [])
        shown = against_summary(change)
        write = partial(write_against, change, wishes=wishes)
    else:
        if fail_on:
            raise UserError("--fail-on is about what changed: give --against DIR_B too")
        shown = comparison.summary(console.width)
        write = partial(write_reports, comparison.report, formats=kinds, wishes=wishes)
    console.print(shown)
    try:
        files = write(out or folder)
    except UserError as error:
        if out or csv or latex:
            raise
        # the results may lie where only reading is allowed
        console.print(f"\nNothing written: {error}", markup=False, highlight=False, soft_wrap=True)
    else:
        name_files(console, files)
    for name in failed:
        console.print(f"Failed: {name}", markup=False, highlight=False, soft_wrap=True)
    leave(comparison.ok and not comparison.skipped and not failed)


def failing_rows(change: Against, words: Sequence[str]) -> list[str]:
    """Name the rows that match `--fail-on`."""
    known = {word: quantity for quantity in QUANTITIES for word in (quantity.more, quantity.less)}
    if unknown := [word for word in words if word not in (*known, "status")]:
        raise UserError(f"--fail-on {unknown[0]}: choose from {', '.join([*known, 'status'])}")
    found = []
    for word in words:
        for pair in change.pairs:
            if word == "status" and pair.status_changed:
                found.append(f"{change.name_of(pair)}: {' → '.join(pair.statuses)}")
            elif word in known and pair.change(known[word]).verdict == word:
                found.append(f"{change.name_of(pair)} is {word}")
    return found


def parse_formats(text: str) -> tuple[str, ...]:
    """Parse formats of figures: `png,svg`."""
    names = tuple(dict.fromkeys(name.strip().lower().lstrip(".") for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in FORMATS]:
        raise UserError(f"no figure format {', '.join(map(repr, unknown))}: choose from {', '.join(FORMATS)}")
    if not names:
        raise UserError(f"no figure format given: choose from {', '.join(FORMATS)}")
    return names

"""Every file that results are turned into, at the end of a sweep and by `dpscope report` alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dpscope.reports.tables import Row, compare_results
from dpscope.reports.text import render_plain, summary
from dpscope.results.schema import Result
from dpscope.results.store import Skipped, write_atomically

SUMMARY = "summary.txt"

# Each writes what it can say of the rows into a folder and names the files; none if it has nothing to say.
Writer = Callable[[Sequence[Row], Path], list[Path]]
WRITERS: tuple[Writer, ...] = ()


def write_reports(results: Sequence[Result], folder: Path, *, skipped: Sequence[Skipped] = ()) -> list[Path]:
    """The summary and whatever else the results allow; the files written."""
    text = folder / SUMMARY
    write_atomically(text, render_plain(summary(results, skipped)))
    rows = compare_results(results)
    return [text, *(path for writer in WRITERS for path in writer(rows, folder))]

"""Every file that results are turned into, at the end of a sweep and by `dpscope report` alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dpscope.errors import UserError
from dpscope.reports.against.csv import AGAINST_CSV, write_against_csv
from dpscope.reports.against.data import Against
from dpscope.reports.against.page import AGAINST_PAGE, write_against_page
from dpscope.reports.against.text import against_summary
from dpscope.reports.against.words import AGAINST_TITLE
from dpscope.reports.export import RESULTS_CSV, TIMELINE_CSV, write_csv
from dpscope.reports.figures import FIGURES, FORMATS, write_figures
from dpscope.reports.latex import RESULTS_TEX, write_latex
from dpscope.reports.page import GENERATOR, PAGE, write_page
from dpscope.reports.sharing import with_paths_from
from dpscope.reports.tables import Row, compare_results, seen_once
from dpscope.reports.text import TITLE, render_plain, summary
from dpscope.reports.trace.csv import write_trace_csv
from dpscope.reports.trace.figures import write_trace_figures
from dpscope.reports.traffic import figures as traffic
from dpscope.reports.traffic.csv import KERNELS, TRAFFIC, write_traffic_csv
from dpscope.reports.traffic.figures import write_traffic_figures
from dpscope.results.schema import Result
from dpscope.results.store import Skipped, write_atomically

SUMMARY, AGAINST = "summary.txt", "against.txt"

# What the first characters of a file hold if dpscope wrote it.
FIRST = 2000
OURS = {SUMMARY: TITLE, AGAINST: AGAINST_TITLE, PAGE: GENERATOR, AGAINST_PAGE: GENERATOR}

# Each writes what it can say of the rows into a folder and names the files; none if it has nothing to say.
# The last argument is the formats of figures: png, svg, pdf. With the instrument whose results it tells, each once.
Writer = Callable[[Sequence[Row], Path, Sequence[str]], list[Path]]
WRITERS: dict[Writer, str] = {
    write_figures: "",  # of every row
    write_trace_figures: "trace",
    write_trace_csv: "trace",
    write_traffic_figures: "ncu",
    write_traffic_csv: "ncu",
}

# Written when they are asked for.
EXPORTS = (RESULTS_CSV, TIMELINE_CSV, RESULTS_TEX)
TABLES: dict[str, Callable[[Sequence[Row], Path], list[Path]]] = {"csv": write_csv, "latex": write_latex}


def write_reports(
    results: Sequence[Result],
    folder: Path,
    *,
    skipped: Sequence[Skipped] = (),
    formats: Sequence[str] = ("png",),
    tables: Sequence[str] = (),
) -> list[Path]:
    """The summary and whatever else the results allow, figures in each of `formats`; the files written."""
    text = folder / SUMMARY
    results = with_paths_from(folder, results)
    try:
        _require_ours(text, folder / PAGE)
        write_atomically(text, render_plain(summary(results, skipped, detailed=True)))
        page = write_page(results, folder, skipped=skipped)  # first: the rest takes seconds
        rows = compare_results(results)
        drawn = [
            path
            for writer, instrument in WRITERS.items()
            for path in writer(seen_once(rows, instrument), folder, formats)
        ]
        return [text, *page, *drawn, *(path for name in tables for path in TABLES[name](rows, folder))]
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def write_against(against: Against, folder: Path, *, csv: bool = False) -> list[Path]:
    """Two sweeps side by side, in files of their own: the reports of each sweep stay as they are."""
    text = folder / AGAINST
    try:
        _require_ours(text, folder / AGAINST_PAGE)
        write_atomically(text, render_plain(against_summary(against)))
        return [text, *write_against_page(against, folder), *(write_against_csv(against, folder) if csv else [])]
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def remove_reports(folder: Path) -> None:
    """Remove the files of an earlier sweep that no longer belong to the results, and nothing else."""
    figure = re.compile(rf"({'|'.join((*FIGURES, *traffic.FIGURES))})(_.*bs\d+.*)?\.({'|'.join(FORMATS)})")
    names = (*EXPORTS, TRAFFIC, KERNELS, AGAINST_CSV)
    for path in folder.iterdir():
        known = figure.fullmatch(path.name) or path.name in names or path.name in OURS
        if path.is_file() and known and _is_ours(path):
            path.unlink()


def _require_ours(*paths: Path) -> None:
    """A file that somebody else wrote is not replaced."""
    for path in paths:
        if path.is_file() and not _is_ours(path):
            raise UserError(f"{path} is there already and is not dpscope's: choose another --out")


def _is_ours(path: Path) -> bool:
    """Names that others use too say so in their first lines."""
    if path.name not in OURS:
        return True
    with path.open(encoding="utf-8", errors="replace") as file:
        head, mark = file.read(FIRST), OURS[path.name]
    return head.startswith(mark) if path.suffix == ".txt" else mark in head

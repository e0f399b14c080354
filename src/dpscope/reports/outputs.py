"""Every file that results are turned into, at the end of a sweep and by `dpscope report` alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dpscope.errors import UserError
from dpscope.reports.against import Against
from dpscope.reports.against_records import AGAINST_CSV, write_against_csv
from dpscope.reports.against_text import against_summary
from dpscope.reports.against_words import AGAINST_TITLE
from dpscope.reports.export import RESULTS_CSV, TIMELINE_CSV, write_csv
from dpscope.reports.figures import FIGURES, FORMATS, traffic, write_figures
from dpscope.reports.figures.traces import write_trace_figures
from dpscope.reports.figures.traffic import write_traffic_figures
from dpscope.reports.latex import RESULTS_TEX, write_latex
from dpscope.reports.page import write_page
from dpscope.reports.page.against import AGAINST_PAGE, write_against_page
from dpscope.reports.tables import Row, compare_results
from dpscope.reports.text import TITLE, render_plain, summary
from dpscope.reports.trace_csv import write_trace_csv
from dpscope.reports.traffic_csv import KERNELS, TRAFFIC, write_traffic_csv
from dpscope.results.schema import Result
from dpscope.results.store import Skipped, write_atomically

SUMMARY, AGAINST = "summary.txt", "against.txt"

# Each writes what it can say of the rows into a folder and names the files; none if it has nothing to say.
# The last argument is the formats of figures: png, svg, pdf.
Writer = Callable[[Sequence[Row], Path, Sequence[str]], list[Path]]
WRITERS: tuple[Writer, ...] = (
    write_figures,
    write_trace_figures,
    write_trace_csv,
    write_traffic_figures,
    write_traffic_csv,
)

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
    try:
        _require_ours(text, TITLE)
        write_atomically(text, render_plain(summary(results, skipped, detailed=True)))
        rows = compare_results(results)
        drawn = [path for writer in WRITERS for path in writer(rows, folder, formats)]
        page = write_page(results, folder, skipped=skipped)
        return [text, *page, *drawn, *(path for name in tables for path in TABLES[name](rows, folder))]
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def write_against(against: Against, folder: Path, *, csv: bool = False) -> list[Path]:
    """Two sweeps side by side, in files of their own: the reports of each sweep stay as they are."""
    text = folder / AGAINST
    try:
        _require_ours(text, AGAINST_TITLE)
        write_atomically(text, render_plain(against_summary(against)))
        return [text, *write_against_page(against, folder), *(write_against_csv(against, folder) if csv else [])]
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def remove_reports(folder: Path) -> None:
    """Remove the files of an earlier sweep that no longer belong to the results, and nothing else."""
    figure = re.compile(rf"({'|'.join((*FIGURES, *traffic.FIGURES))})(_.*bs\d+.*)?\.({'|'.join(FORMATS)})")
    names = (*EXPORTS, TRAFFIC, KERNELS, AGAINST_PAGE, AGAINST_CSV)
    if _is_ours(folder / AGAINST, AGAINST_TITLE):
        (folder / AGAINST).unlink()
    for path in folder.iterdir():
        if path.is_file() and (figure.fullmatch(path.name) or path.name in names):
            path.unlink()


def _require_ours(path: Path, title: str) -> None:
    """A text that somebody else wrote is not replaced."""
    if path.is_file() and not _is_ours(path, title):
        raise UserError(f"{path} is there already and is not dpscope's: choose another --out")


def _is_ours(path: Path, title: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(title)

"""Every file that results are turned into, at the end of a sweep and by `dpscope report` alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.reports.against.data import AGAINST_CSV, Against
from dpscope.reports.against.text import AGAINST_PAGE, AGAINST_TEXT
from dpscope.reports.export import CSV, LATEX, TRACE_CSV, TRAFFIC_CSV
from dpscope.reports.findings import FINDINGS
from dpscope.reports.memory.figures import MEMORY_FIGURES
from dpscope.reports.output import Content, Output
from dpscope.reports.page.render import PAGE
from dpscope.reports.report import Report
from dpscope.reports.text import SUMMARY
from dpscope.reports.time_charts import TRADEOFF_FIGURE
from dpscope.reports.trace.figures import TRACE_FIGURES
from dpscope.reports.traffic.figures import ROOFLINE, TRAFFIC_BYTES

FIGURES = (*MEMORY_FIGURES, TRADEOFF_FIGURE)  # of what every comparison measures

# In the order in which they are written: text and page first, the figures take seconds.
OUTPUTS: tuple[Output[Report], ...] = (
    *(SUMMARY, PAGE, *FINDINGS, *FIGURES),
    *(*TRACE_FIGURES, *TRACE_CSV, ROOFLINE, TRAFFIC_BYTES, *TRAFFIC_CSV),
    *(*CSV, LATEX),
)
AGAINST_OUTPUTS: tuple[Output[Against], ...] = (AGAINST_TEXT, AGAINST_PAGE, AGAINST_CSV)


def write_reports(
    report: Report, folder: Path, *, formats: Sequence[str] = ("png",), wishes: Collection[str] = ()
) -> list[Path]:
    """Write the summary and all outputs that the results allow, figures in each of `formats`; return the files."""
    told_from_here = report if report.folder == folder else Report.of(report.results, report.skipped, folder=folder)
    return _write(OUTPUTS, told_from_here, folder, formats, wishes)


def write_against(against: Against, folder: Path, *, wishes: Collection[str] = ()) -> list[Path]:
    """Write the comparison of two sweeps into files of its own; the reports of each sweep stay as they are."""
    return _write(AGAINST_OUTPUTS, against, folder, (), wishes)


def _write(
    outputs: Sequence[Output[Content]], subject: Content, folder: Path, formats: Sequence[str], wishes: Collection[str]
) -> list[Path]:
    wanted = [output for output in outputs if not output.asked_for or output.asked_for in wishes]
    try:
        for output in wanted:
            path = folder / output.name
            if path.is_file() and not output.is_marked(path):  # somebody else wrote it
                raise UserError(f"{path} is there already and is not dpscope's: choose another --out")
        return [path for output in wanted for path in output.write(subject, folder, formats)]
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None


def remove_reports(folder: Path) -> None:
    """Remove the files of an earlier sweep that no longer belong to the results, and nothing else."""
    outputs: tuple[Output[Any], ...] = (*OUTPUTS, *AGAINST_OUTPUTS)
    for path in folder.iterdir():
        if path.is_file() and any(output.has_name(path.name) and output.is_marked(path) for output in outputs):
            path.unlink()

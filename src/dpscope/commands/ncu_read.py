"""`dpscope ncu-read`: reports of Nsight Compute as a table or CSV, without a GPU."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dpscope.commands.sweeping import make_console
from dpscope.endings import leave
from dpscope.errors import UserError
from dpscope.plain_text import bare_table
from dpscope.runner.measurements.ncu import Figures, read_ncu_reports
from dpscope.units import MISSING, format_ratio, format_traffic

COLUMNS = {
    "DRAM read": "dram_read_bytes",
    "DRAM write": "dram_write_bytes",
    "L2 read": "l2_read_bytes",
    "L2 write": "l2_write_bytes",
    "L2 to SM": "l2_to_sm_bytes",
}


@click.command(name="ncu-read")
@click.argument("paths", metavar="REPORT_OR_FOLDER…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps in each report.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV in bytes, with every figure, instead of the table.")
def command(paths: Sequence[Path], steps: int, as_csv: bool) -> None:
    """Show bytes per step in reports of ncu, next to the report named `standard` or `vanilla` of the same size.

    A report of kernels is added up. Needs ncu or the package ncu-report, and no GPU.

    \b
    dpscope ncu-read ncu_reports --steps 5
    dpscope ncu-read step.ncu-rep --csv > step.csv
    """
    found = [report for path in paths for report in (sorted(path.glob("*.ncu-rep")) if path.is_dir() else [path])]
    if not found:
        raise UserError(f"no .ncu-rep files in {', '.join(map(str, paths))}")
    figures, broken = read_ncu_reports(found, steps)
    if as_csv:
        names = list(dict.fromkeys(name for seen in figures.values() for name in seen))
        writer = csv.writer(sys.stdout)
        writer.writerow(["report", *names])
        writer.writerows([path.stem, *(seen.get(name, "") for name in names)] for path, seen in figures.items())
    elif figures:
        _show(figures, steps)
    for path, reason in broken.items():
        print(f"Left out: {path}: {reason}", file=sys.stderr)
    leave(not broken)


def _show(figures: dict[Path, Figures], steps: int) -> None:
    table = bare_table("report", *COLUMNS, "DRAM ×", wrap=("report",))
    for path, seen in figures.items():
        cells = [format_traffic(seen.get(name)) for name in COLUMNS.values()]
        table.add_row(path.stem, *cells, format_ratio(_ratio(path, figures)))
    console = make_console()
    console.print(table)
    each = "a step" if steps == 1 else f"a step ({steps} steps in each report)"
    console.print(
        f"Bytes {each}, 1 GB = 10⁹; × is DRAM bytes next to standard, {MISSING} where no such report is beside it."
    )


def _ratio(path: Path, figures: dict[Path, Figures]) -> float | None:
    """Return DRAM bytes relative to the standard report of the same size (report_standard_bs8_seq256)."""
    size = path.stem.partition("_bs")[2]
    names = {f"report_{name}_bs{size}" for name in ("standard", "vanilla")}
    beside = next((seen for other, seen in figures.items() if size and other.stem in names), None)
    dram = COLUMNS["DRAM read"], COLUMNS["DRAM write"]
    if beside is None or not all(name in part for name in dram for part in (beside, figures[path])):
        return None
    own, standard = (float(sum(part[name] for name in dram)) for part in (figures[path], beside))
    return own / standard if standard else None

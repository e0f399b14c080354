"""Captures of Nsight that exist, read on any machine, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.instruments.ncu.kernels import add_up_metrics
from dpscope.instruments.ncu.metrics import TRAFFIC_FORMULAS, make_figures, make_flops
from dpscope.instruments.ncu.reading import UnreadableReport, read_report
from dpscope.instruments.nsys.command import find_nsys, needed_variables
from dpscope.instruments.nsys.failures import NO_NSYS
from dpscope.instruments.nsys.reading import read_timeline
from dpscope.instruments.nsys.running import export_report
from dpscope.instruments.nsys.summary import summarise_timeline
from dpscope.results.payloads.nsys import NsysPayload

Figures = dict[str, Any]


def read_ncu_reports(reports: Iterable[Path], steps: int) -> tuple[dict[Path, Figures], dict[Path, str]]:
    """Return the figures of an average step by report, kernels added up; and why others could not be read."""
    figures: dict[Path, Figures] = {}
    broken: dict[Path, str] = {}
    for report in reports:
        try:
            actions = read_report(report)
        except UnreadableReport as error:
            broken[report] = str(error)
            continue
        values = add_up_metrics(actions)
        traffic, _ = make_figures(values, TRAFFIC_FORMULAS)
        flops = {f"{unit}_flops": count for unit, count in make_flops(values).items()}
        averages = {name: value / steps for name, value in {**traffic, **flops}.items()}
        figures[report] = averages | {"rows": len(actions)}
    return figures, broken


def read_nsys_capture(path: Path) -> NsysPayload:
    """Return the summary of a `.sqlite` or `.nsys-rep` file; the latter is exported first, beside it."""
    return summarise_timeline(read_timeline(_exported(path)))


def _exported(path: Path) -> Path:
    if path.suffix != ".nsys-rep" or not path.is_file():
        return path
    if (database := path.with_suffix(".sqlite")).exists():
        return database
    nsys = find_nsys()
    if nsys is None:
        raise UserError(f"{path} has to be exported first, and {NO_NSYS}")
    made, failure, _ = export_report(nsys, path, environment=needed_variables(os.environ))
    if made is None:
        raise UserError(str(failure))
    return made

"""The figures of traffic: sizes side by side, since what grows with the size is the question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpscope.reports.figures.style import save
from dpscope.reports.tables import Row
from dpscope.reports.traffic.bytes_figure import draw_traffic_bytes
from dpscope.reports.traffic.roofline_figure import draw_roofline

FIGURES = {"roofline": draw_roofline, "traffic_bytes": draw_traffic_bytes}


def write_traffic_figures(rows: Sequence[Row], folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Each figure that the rows allow, in each format."""
    drawn = {name: draw(rows) for name, draw in FIGURES.items()}
    return [path for name, figure in drawn.items() if figure for path in save(figure, folder, name, formats)]

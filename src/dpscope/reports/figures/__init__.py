"""Pictures of results, for papers. matplotlib is loaded when the first is drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dpscope.reports.figures.style import FORMATS, parse_formats, save
from dpscope.reports.memory.breakdown_figure import draw_breakdown
from dpscope.reports.memory.timeline_figure import draw_timeline
from dpscope.reports.tables import Row, group_by_size, varying_columns
from dpscope.reports.time.tradeoff_figure import draw_tradeoff

__all__ = ["FIGURES", "FORMATS", "parse_formats", "write_figures"]

FIGURES = {
    "memory_breakdown_comparison": draw_breakdown,
    "memory_timeline": draw_timeline,
    "performance_tradeoff": draw_tradeoff,
}


def write_figures(rows: Sequence[Row], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Every figure that the rows allow. Sizes are not mixed: with several, each gets its own, named by its size."""
    paths = []
    for suffix, group in suffixed(rows).items():
        for name, draw in FIGURES.items():
            if (figure := draw(group)) is not None:
                paths += save(figure, folder, name + suffix, formats)
    return paths


def suffixed(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What is compared with each other, under what tells it apart: `_bs8_seq1024`, or nothing for the only size."""
    groups = group_by_size(rows)
    if len(groups) == 1:
        return {"": groups[0]}
    named: dict[str, list[Row]] = {}
    settings = varying_columns(rows, ("dtype", "optimizer", "device"))
    several_models = len({row.first.spec["workload"]["name"] for row in rows}) > 1
    for group in groups:
        spec = group[0].first.spec
        parts = [spec["workload"]["name"]] if several_models else []
        parts += [f"bs{spec['batch_size']}"] + ([f"seq{spec['seq_len']}"] if spec.get("seq_len") else [])
        parts += [str(spec[setting]) for setting in settings]
        suffix = re.sub(r"[^\w.-]+", "-", "".join(f"_{part}" for part in parts))
        number = 2
        while suffix in named:  # they differ in something that has no place in a file's name
            suffix = f"{suffix.rpartition('-')[0] or suffix}-{number}"
            number += 1
        named[suffix] = group
    return named

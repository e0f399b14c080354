"""The figures of traffic have a panel for each size, since what grows with the size is the question; here is the one of
DRAM bytes, read and written or family by family, a bar a method."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.style import FONT, SMALL, new_figure, styled
from dpscope.reports.output import figure_output
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import Part, Traffic, TrafficGroups, by_size, direction_parts, family_parts
from dpscope.reports.words import shorten
from dpscope.units import MISSING, format_ratio, format_traffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_ACROSS = 4  # panels side by side
MOST_LETTERS = 60  # of method names side by side: more are written aslant
WIDEST_SLOTS = 7  # bars that a lone panel has room for: fewer do not grow fat
TITLE_HEIGHT = 0.55  # inches
WRAP = 110  # characters of a title's line


def make_panels(groups: TrafficGroups, *, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of `height` inches for each group of one size."""
    columns = min(columns, len(groups))
    lines = -(-len(groups) // columns)
    figure = new_figure(TITLE_HEIGHT + lines * height)
    axes = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    for ax, group in zip(axes, groups if len(groups) > 1 else (), strict=False):
        ax.set_title(group[0].row.size, fontsize=FONT if columns < 4 else SMALL)
    return figure, axes[: len(groups)]


def set_heading(figure: Figure, heading: str, groups: TrafficGroups, note: str) -> None:
    """What is shown, of what and on what; an estimate is called one before anything else."""
    traffics = [traffic for group in groups for traffic in group]
    if all(traffic.estimated for traffic in traffics):
        heading += ": an ESTIMATE from tensor sizes, not measured"
    rows = [traffic.row for traffic in traffics]
    what = ["/".join(dict.fromkeys(row.cell(name) for row in rows)) for name in ("model", "dtype", "optimizer")]
    what += [rows[0].size] if len(groups) == 1 else []
    machines = [row.first.environment for row in rows if row.first.environment]
    where = dict.fromkeys(str(machine.get("gpu") or machine.get("cpu")) for machine in machines)
    lines = [heading, "; ".join(filter(None, (", ".join(what), ", ".join(where)))), note]
    figure.suptitle("\n".join(line for text in lines for line in textwrap.wrap(text, WRAP)), fontsize=FONT)


@styled
def draw_traffic_bytes(rows: Sequence[Row]) -> Figure | None:
    """Every size in a panel of its own, on one scale; None if no row has bytes."""
    groups = by_size(rows, lambda traffic: traffic.dram_bytes)
    if not groups:
        return None
    traffics = [traffic for group in groups for traffic in group]
    find_parts = family_parts if all(traffic.by_family for traffic in traffics) else direction_parts
    largest = max(traffic.dram_bytes or 0 for traffic in traffics)
    unit, name = _unit(largest)
    figure, axes = make_panels(groups, columns=PANELS_ACROSS, height=2.5)
    for number, (ax, group) in enumerate(zip(axes, groups, strict=True)):
        _draw_bars(ax, group, find_parts(group), unit, beside=min(PANELS_ACROSS, len(groups)))
        ax.set_ylim(0, 1.18 * largest / unit)
        if number % PANELS_ACROSS == 0:
            ax.set_ylabel(f"DRAM bytes of a step ({name})")
    mixed = len({traffic.source for traffic in traffics}) > 1
    pale = "; ≈ and pale: an estimate from tensor sizes, not measured" if mixed else ""
    set_heading(figure, "DRAM bytes that one training step moves", groups, f"× standard above each bar{pale}")
    _legend(figure, find_parts(traffics), traffics)
    return figure


def _draw_bars(ax: Axes, group: Sequence[Traffic], parts: Sequence[Part], unit: float, *, beside: int) -> None:
    for place, traffic in enumerate(group):
        bottom = 0.0
        for part in parts:
            if count := part.counts[place]:
                ax.bar(place, count / unit, 0.72, bottom=bottom, **_look(part, traffic))
                bottom += count / unit
        text = format_ratio(traffic.ratio)
        told = "" if text == MISSING else traffic.show(text)
        ax.annotate(told, (place, bottom), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL)
    ax.set_xticks(range(len(group)), [shorten(traffic.method, 12) for traffic in group])
    if beside * sum(len(traffic.method) for traffic in group) > MOST_LETTERS:
        ax.tick_params(axis="x", labelrotation=30)
    ax.tick_params(axis="x", length=0)
    middle = (len(group) - 1) / 2
    half = max(len(group), WIDEST_SLOTS if beside == 1 else 0) / 2
    ax.set_xlim(middle - half, middle + half)


def _legend(figure: Figure, parts: Sequence[Part], traffics: Sequence[Traffic]) -> None:
    """Each part as the first bar that has it shows it."""
    from matplotlib.patches import Patch

    firsts = [next((t for t, count in zip(traffics, part.counts, strict=True) if count), traffics[0]) for part in parts]
    patches = [Patch(label=part.label, **_look(part, first)) for part, first in zip(parts, firsts, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, handlelength=1.6)


def _look(part: Part, traffic: Traffic) -> dict[str, Any]:
    pale: dict[str, Any] = {"alpha": 0.55} if traffic.estimated else {}
    if part.colour is None:
        return {"facecolor": "white", "edgecolor": "0.6", "linewidth": 0.4, "hatch": "....", **pale}
    hatch = "//////" if part.private or part.label == "written" else None
    return {"facecolor": part.colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4, **pale}


def _unit(largest: float) -> tuple[float, str]:
    """The decimal unit of an axis, and its size in bytes."""
    unit = 10.0 ** max(0, min(12, (len(str(int(largest))) - 1) // 3 * 3))
    return unit, format_traffic(unit).rpartition(" ")[2]


TRAFFIC_HOLDS = "DRAM bytes of a step by family of kernels"
TRAFFIC_BYTES = figure_output("traffic_bytes", TRAFFIC_HOLDS, draw_traffic_bytes, instrument="ncu", sizes_apart=False)

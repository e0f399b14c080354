"""`traffic_bytes`: the DRAM bytes of a step, read and written or family by family, a bar a method, a panel a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpscope.reports.figures.style import SMALL, styled
from dpscope.reports.palette import DIRECTION_COLOURS, FAMILY_COLOURS, PRIVATE_FAMILIES
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import READ, UNSEEN, WRITE, Traffic, by_size, compare_traffic
from dpscope.reports.traffic.panels import make_panels, set_heading
from dpscope.reports.words import shorten
from dpscope.units import MISSING, format_ratio, format_traffic
from dpscope.vocabulary.families import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4  # panels side by side
MOST_LETTERS = 60  # of method names side by side: more are written aslant
WIDEST_SLOTS = 7  # bars that a lone panel has room for: fewer do not grow fat


class Part(NamedTuple):
    label: str
    size: float  # bytes
    look: dict[str, Any]


@styled
def draw_traffic_bytes(rows: Sequence[Row]) -> Figure | None:
    """Every size in a panel of its own, on one scale; None if no row has bytes."""
    groups = [[t for t in group if t.dram_bytes] for group in by_size(compare_traffic(rows))]
    groups = [group for group in groups if group]
    if not groups:
        return None
    traffics = [traffic for group in groups for traffic in group]
    by_family = all(traffic.by_family for traffic in traffics)
    figure, panels = make_panels(groups, columns=COLUMNS, height=2.5)
    unit, name = _unit(max(traffic.dram_bytes or 0 for traffic in traffics))
    legend: dict[str, Any] = {}
    for number, (ax, group) in enumerate(panels):
        _draw_bars(ax, group, unit, by_family, legend, beside=min(COLUMNS, len(groups)))
        if number % COLUMNS == 0:
            ax.set_ylabel(f"DRAM bytes of a step ({name})")
    top = 1.18 * max(traffic.dram_bytes or 0 for traffic in traffics) / unit
    for ax in figure.axes:
        ax.set_ylim(0, top)
    mixed = len({traffic.source for traffic in traffics}) > 1
    notes = ["× standard above each bar"] + (
        ["≈ and pale: an estimate from tensor sizes, not measured"] if mixed else []
    )
    set_heading(figure, "DRAM bytes that one training step moves", groups, ["; ".join(notes)])
    order = [*FAMILY_LABELS.values(), UNSEEN, *DIRECTION_COLOURS]
    handles = sorted(legend.values(), key=lambda patch: order.index(patch.get_label()))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, handlelength=1.6)
    return figure


def _draw_bars(
    ax: Axes, group: Sequence[Traffic], unit: float, by_family: bool, legend: dict[str, Any], *, beside: int
) -> None:
    from matplotlib.patches import Patch

    for place, traffic in enumerate(group):
        bottom = 0.0
        pale: dict[str, Any] = {"alpha": 0.55} if traffic.estimated else {}
        for part in _family_parts(traffic) if by_family else _direction_parts(traffic):
            ax.bar(place, part.size / unit, 0.72, bottom=bottom, **part.look, **pale)
            legend.setdefault(part.label, Patch(label=part.label, **part.look, **pale))
            bottom += part.size / unit
        text = format_ratio(traffic.ratio)
        mark = "≈" if traffic.estimated and text != MISSING else ""
        told = f"{mark}{text}" if text != MISSING else ""
        ax.annotate(told, (place, bottom), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL)
    ax.set_xticks(range(len(group)), [shorten(traffic.row.method, 12) for traffic in group])
    if beside * sum(len(traffic.row.method) for traffic in group) > MOST_LETTERS:
        ax.tick_params(axis="x", labelrotation=30)
    ax.tick_params(axis="x", length=0)
    middle = (len(group) - 1) / 2
    half = max(len(group), WIDEST_SLOTS if beside == 1 else 0) / 2
    ax.set_xlim(middle - half, middle + half)


def _direction_parts(traffic: Traffic) -> list[Part]:
    counts = {"read": traffic.figure(READ) or 0, "written": traffic.figure(WRITE) or 0}
    edge = {"edgecolor": "white", "linewidth": 0.4}
    hatch = {"read": None, "written": "//////"}
    return [
        Part(label, count, {"facecolor": DIRECTION_COLOURS[label], "hatch": hatch[label], **edge})
        for label, count in counts.items()
    ]


def _family_parts(traffic: Traffic) -> list[Part]:
    """Families, and what the whole step moved beyond its kernels' sum."""
    parts = traffic.family_parts().items()
    return [Part(FAMILY_LABELS.get(family, family), count, _family_look(family)) for family, count in parts]


def _family_look(family: str) -> dict[str, Any]:
    if family == UNSEEN:
        return {"facecolor": "white", "edgecolor": "0.6", "linewidth": 0.4, "hatch": "...."}
    hatch = "//////" if family in PRIVATE_FAMILIES else None
    return {"facecolor": FAMILY_COLOURS[family], "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}


def _unit(largest: float) -> tuple[float, str]:
    """The decimal unit of an axis, and its size in bytes."""
    unit = 10.0 ** max(0, min(12, (len(str(int(largest))) - 1) // 3 * 3))
    return unit, format_traffic(unit).rpartition(" ")[2]

"""`memory_breakdown_comparison`: what each method's peak is made of, and what it holds beyond ordinary training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.style import (
    SMALL,
    byte_unit,
    component_legend,
    look_of,
    new_figure,
    not_drawn,
    set_title,
    settle,
    styled,
    three_digits,
)
from dpscope.reports.memory.data import Composition, composition_of, in_order, why_no_composition
from dpscope.reports.palette import colour_of, is_dark
from dpscope.reports.tables import Row
from dpscope.reports.words import shorten
from dpscope.vocabulary.methods import STANDARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR = 0.6  # of the distance between two methods
LONGEST_TICK = 24  # characters


@styled
def draw_breakdown(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size; None if none of them has a breakdown."""
    found = [(row, composition_of(row)) for row in rows]
    methods = [row.method for row, composition in found if composition]
    shown = [composition for _, composition in found if composition]
    if not shown:
        return None
    figure = new_figure(1.6 + 0.36 * len(shown))
    peak, extra = figure.subplots(1, 2, sharey=True)
    peak.set_yticks(range(len(shown)), [shorten(method, LONGEST_TICK) for method in methods])
    peak.set_ylim(len(shown) - 0.5, -0.5)
    present = in_order(key for each in shown for key, count in each.components.items() if count)
    component_legend(figure, present)
    notes = not_drawn([(row, why_no_composition(row)) for row, composition in found if not composition])
    set_title(figure, "Memory at the peak of a training step", rows, notes)

    unit, name = byte_unit(max(each.total for each in shown))
    peak.set_xlabel(f"at the peak ({name})")
    segments = _stack(peak, [each.components for each in shown], unit)
    totals = [f"{three_digits(each.total / unit)} {name}" for each in shown]
    _write_totals(peak, [_reach(each.components) / unit for each in shown], totals)
    segments += _draw_extra(extra, methods, shown)
    settle(figure)
    _write_values(segments)
    return figure


def _draw_extra(ax: Axes, methods: Sequence[str], compositions: Sequence[Composition]) -> list[tuple[Any, str, float]]:
    """Each method's bytes beyond standard's, component by component: more to the right, less to the left."""
    standard = compositions[methods.index(STANDARD)] if STANDARD in methods else None
    if standard is None or len(compositions) == 1:
        reason = "no standard at this size" if standard is None else "standard is the only method"
        ax.text(0.5, 0.5, f"nothing to compare with:\n{reason}", transform=ax.transAxes, ha="center", va="center")
        ax.set_axis_off()
        return []
    extras = [composition.extra_over(standard) for composition in compositions]
    unit, name = byte_unit(max(sum(abs(count) for count in extra.values()) for extra in extras))
    ax.set_xlabel(f"more than standard holds ({name}); line: net")
    ax.axvline(0, color="black", linewidth=0.6)
    ax.tick_params(left=False, labelleft=False)
    ax.spines["left"].set_visible(False)
    segments = _stack(ax, extras, unit)
    nets = [sum(extra.values()) for extra in extras]
    amounts = [three_digits(abs(net) / unit) for net in nets]
    signs = ["+" if net > 0 else "−" for net in nets]
    texts = [
        "standard" if method == STANDARD else f"{sign if float(amount) else '±'}{amount} {name}"
        for method, sign, amount in zip(methods, signs, amounts, strict=True)
    ]
    _write_totals(ax, [_reach(extra) / unit for extra in extras], texts)
    for place, net in enumerate(nets):
        ax.plot([0, net / unit], [place + BAR / 2 + 0.1] * 2, color="black", linewidth=1.6, solid_capstyle="butt")
    return segments


def _reach(components: Mapping[str, float]) -> float:
    """How far to the right a stack goes."""
    return sum(count for count in components.values() if count > 0)


def _stack(ax: Axes, stacks: Sequence[Mapping[str, float]], unit: float) -> list[tuple[Any, str, float]]:
    """Bars of stacked components, what is below zero to the left of it; each segment with its component and value."""
    segments = []
    for place, components in enumerate(stacks):
        ends = {True: 0.0, False: 0.0}
        for key, count in components.items():
            value, more = count / unit, count > 0
            if value:
                (bar,) = ax.barh(place, value, BAR, left=ends[more], **look_of(key))
                bar.set_gid(f"{key}:{place}")
                segments.append((bar, key, value))
                ends[more] += value
    return segments


def _write_totals(ax: Axes, ends: Sequence[float], texts: Sequence[str]) -> None:
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        ax.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL)


def _write_values(segments: Sequence[tuple[Any, str, float]]) -> None:
    """The value inside every segment that has room for it."""
    for bar, key, value in segments:
        ax = bar.axes
        ink = "white" if is_dark(colour_of(key)) else "black"
        text = ax.text(
            bar.get_x() + bar.get_width() / 2,
            bar.get_y() + bar.get_height() / 2,
            three_digits(abs(value)),
            ha="center",
            va="center",
            color=ink,
            fontsize=SMALL,
        )
        if look_of(key)["hatch"]:  # figures are not read through a hatch
            plate = {"boxstyle": "square,pad=0.15", "facecolor": colour_of(key), "edgecolor": "none"}
            text.set_bbox(plate)
        room = bar.get_window_extent().width - 4
        if text.get_window_extent().width > room:
            text.remove()

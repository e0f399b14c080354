"""Stacked bars: the parts of each method's bytes or milliseconds, a panel for each comparison."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.style import SMALL, new_panels, patch_legend, set_title, settle, styled
from dpscope.reports.palette import BLANK, is_dark
from dpscope.reports.words import shorten
from dpscope.units import three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR = 0.62  # of the distance between two bars
BAR_HEIGHTS = {True: 0.3, False: 0.18}  # inches: of bars with figures inside, and without
FRAME_HEIGHT, MARGIN_HEIGHT = 0.45, 0.9  # inches: around a panel, around all panels
LONGEST_NAME = 56  # characters, where panels stand below each other


@dataclass(frozen=True, kw_only=True)
class BarPanel:
    """Bars from top to bottom, each a stack of parts; negative parts extend left of zero."""

    names: Sequence[str]  # of the bars; without any, only `axis` is written
    parts: Mapping[str, Sequence[float | None]]  # label -> its value in each bar, in the order of stacking
    ends: Sequence[str]  # what stands at the right end of each bar
    axis: str
    title: str = ""
    pale: Collection[int] = ()  # bars of estimates
    inside: bool = True  # figures in the segments that have room for them
    net: bool = False  # a line below each bar, as long as its parts together


@styled
def draw_bars(
    title: Sequence[str],
    panels: Sequence[BarPanel],
    looks: Mapping[str, Mapping[str, Any]],
    *,
    columns: int = 1,
    one_scale: bool = True,
) -> Figure:
    """Draw stacked bars; `looks`: how each part is filled, with a legend of them."""
    columns = min(columns, len(panels))
    lines = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    bars = [max(len(panel.names) * BAR_HEIGHTS[panel.inside] for panel in line) for line in lines]
    heights = [FRAME_HEIGHT + height for height in bars]
    figure, axes = new_panels(len(panels), columns, MARGIN_HEIGHT, heights, sharex=one_scale)
    for number, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
        beside = number % columns > 0 and panel.names == panels[number - 1].names
        _draw_panel(ax, panel, looks, longest=LONGEST_NAME // columns, named=not beside)
        lowest = number + columns >= len(panels) or not one_scale
        ax.set_xlabel(panel.axis if lowest else "")
        ax.tick_params(labelbottom=lowest)
    patch_legend(figure, looks, 4 if max(map(len, looks)) > 15 else 6)
    set_title(figure, *title)
    settle(figure)
    for ax, panel in zip(axes, panels, strict=True):
        if panel.inside:
            _write_values(ax)
    return figure


def _draw_panel(
    ax: Axes, panel: BarPanel, looks: Mapping[str, Mapping[str, Any]], *, longest: int, named: bool
) -> None:
    if not panel.names:
        ax.text(0.5, 0.5, panel.axis, transform=ax.transAxes, ha="center", va="center")
        ax.set_axis_off()
        return
    for place, end in enumerate(panel.ends):
        stacked = {True: 0.0, False: 0.0}  # to the right of zero, to the left
        for label, values in panel.parts.items():
            if value := values[place]:
                look = {**looks[label], **({"alpha": 0.55} if place in panel.pale else {})}
                ax.barh(place, value, BAR, left=stacked[value > 0], gid=f"{label}:{place}", **look)
                stacked[value > 0] += value
        ax.annotate(end, (stacked[True], place), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
        if panel.net:
            below = [place + BAR / 2 + 0.1] * 2
            ax.plot([0, sum(stacked.values())], below, color="black", linewidth=1.6, solid_capstyle="butt")
    ax.set_title(panel.title, loc="left", fontweight="bold")
    ax.set_yticks(range(len(panel.names)), [shorten(name, longest) for name in panel.names])
    ax.set_ylim(len(panel.names) - 0.5, -0.5)
    ax.axvline(0, color="black", linewidth=0.6)
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False, labelleft=named)


def _write_values(ax: Axes) -> None:
    """Write the value inside every segment that has room for it."""
    from matplotlib.colors import to_hex

    bar: Any
    for bar in ax.patches:
        middle, colour = bar.get_x() + bar.get_width() / 2, to_hex(bar.get_facecolor())
        ink = "white" if is_dark(colour) else "black"
        centred: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "fontsize": SMALL}
        text = ax.text(middle, bar.get_y() + BAR / 2, three_digits(abs(bar.get_width())), **centred)
        if bar.get_hatch():  # figures are not read through a hatch
            text.set_bbox({"boxstyle": "square,pad=0.15", "facecolor": colour, "edgecolor": "none"})
        if text.get_window_extent().width > bar.get_window_extent().width - 4:
            text.remove()


def filled(colour: str | None, hatched: bool = False) -> dict[str, Any]:
    """Return the fill of a part: hatched if only private training has it, dotted if it has no colour."""
    if colour is None:
        return {"facecolor": BLANK, "edgecolor": "0.6", "linewidth": 0.4, "hatch": "...."}
    edge = "0.4" if colour == BLANK else "white"
    return {"facecolor": colour, "edgecolor": edge, "linewidth": 0.4, "hatch": "//////" if hatched else None}

"""Pictures for papers: their style, stacked bars, and points with a legend.

Sizes fit a paper's columns, type is readable, files are reproducible. matplotlib is loaded when the first is drawn.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dpscope.reports.looks import BLANK, is_dark, shorten
from dpscope.reports.tables import Row
from dpscope.results.identity import step_in_words
from dpscope.results.store import write_atomically
from dpscope.units import GIB, MIB, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FORMATS = ("png", "svg", "pdf")
PAGE_WIDTH = 7.16  # inches: both columns of a two-column paper
DPI = 240
FONT, SMALL = 8.0, 7.0  # points at real size; nothing is smaller

STYLE = {
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.titley": 1.0,  # where it is; matplotlib would measure every tick to see whether the title covers one
    "axes.labelsize": FONT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "figure.titlesize": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,  # text stays text: searchable, and accepted by publishers
    "svg.fonttype": "none",
    "svg.hashsalt": "dpscope",
}

# Without dates and versions, the same results give the same files. PNG: twice as fast as its default, a tenth larger.
FILES: dict[str, dict[str, Any]] = {
    "png": {"metadata": {"Software": "dpscope"}, "pil_kwargs": {"compress_level": 2}},
    "svg": {"metadata": {"Creator": "dpscope", "Date": None}},
    "pdf": {"metadata": {"Creator": "dpscope", "CreationDate": None}},
}

Draw = TypeVar("Draw", bound=Callable[..., Any])


def styled(draw: Draw) -> Draw:
    """Draw in this style, whatever the user's own matplotlib settings are, and leave those as they were."""

    @functools.wraps(draw)
    def drawn(*arguments: Any, **options: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            return draw(*arguments, **options)

    return cast(Draw, drawn)


def new_figure(height: float) -> Figure:
    """Make a figure as wide as a page, `height` inches high, drawn without a display or any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PAGE_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_panels(
    count: int, columns: int, margin: float, heights: Sequence[float], **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a new figure and its panels, `columns` side by side, with row `heights` and a `margin` in inches."""
    figure = new_figure(margin + sum(heights))
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights, **shared).flatten()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, list(axes[:count])


def settle(figure: Figure) -> None:
    """Freeze the layout, so that labels placed afterwards do not move anything."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)  # an engine that is done would still cost a drawing before each file


@styled
def save(figure: Figure, folder: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """Write one file for each format, replaced atomically, so that no reader sees half a picture."""
    paths = [folder / f"{name}.{kind}" for kind in formats]
    for path, kind in zip(paths, formats, strict=True):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, **FILES[kind])
        write_atomically(path, picture.getvalue())
    return paths


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit an axis is read in, and its size in bytes: the largest unit that fits twice."""
    units = ((float(GIB), "GiB"), (float(MIB), "MiB"), (1024.0, "KiB"))
    return next((unit for unit in units if largest >= 2 * unit[0]), (1.0, "B"))


def set_title(figure: Figure, *lines: str) -> None:
    figure.suptitle("\n".join(line for text in lines for line in textwrap.wrap(text, 110)), fontsize=FONT)


def not_drawn(reasons: Sequence[tuple[Row, str]]) -> list[str]:
    """Return the note that names rows which a figure leaves out."""
    return [f"Not drawn: {', '.join(f'{row.method} ({reason})' for row, reason in reasons)}"] if reasons else []


def describe(rows: Sequence[Row]) -> str:
    """Describe what a figure was measured on, and its size if it shows only one."""
    about = [(row.field("model"), row.size, step_in_words(row.spec), row.machine or "") for row in rows]
    models, sizes, steps, machines = (list(dict.fromkeys(filter(None, each))) for each in zip(*about, strict=True))
    what = ["/".join(models), *(sizes if len(sizes) == 1 else ()), "/".join(steps)]
    return "; ".join(filter(None, (", ".join(filter(None, what)), ", ".join(machines))))


def patch_legend(figure: Figure, looks: Mapping[str, Mapping[str, Any]], columns: int) -> None:
    """Add a legend below the panels: a patch for each label."""
    from matplotlib.patches import Patch

    patches = [Patch(label=label, **look) for label, look in looks.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, handlelength=1.6)


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


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    label: str  # in the legend; "" for a point without a name
    colour: str
    marker: str
    spread: tuple[float, float] | None = None  # of x: 10th and 90th percentile
    size: float = 6.0  # points
    hollow: bool = False

    @property
    def look(self) -> dict[str, Any]:
        fill = "white" if self.hollow else self.colour
        return {"marker": self.marker, "color": self.colour, "markersize": self.size, "markerfacecolor": fill}


def draw_points(ax: Axes, points: Sequence[Point]) -> None:
    """Draw the points, the small ones behind the others."""
    for point in points:
        low, high = point.spread or (point.x, point.x)
        spread = [[max(point.x - low, 0.0)], [max(high - point.x, 0.0)]] if point.spread else None
        ax.errorbar(point.x, point.y, xerr=spread, elinewidth=1.0, capsize=2, ls="", zorder=point.size, **point.look)


def name_points(figure: Figure, points: Iterable[Point], columns: int) -> None:
    """Name the points in a legend below the panels, each name once."""
    from matplotlib.lines import Line2D

    looks = {point.label: point.look for point in points if point.label}
    handles = [Line2D([], [], linestyle="", label=label, **look) for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)

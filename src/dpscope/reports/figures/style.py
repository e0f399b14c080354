"""Style of all figures: sizes that fit a paper's columns, readable type, and reproducible files."""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dpscope.reports.tables import Row
from dpscope.results.identity import step_in_words
from dpscope.results.store import write_atomically
from dpscope.units import GIB, MIB

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

"""What all figures share: sizes that fit a paper's columns, type that can be read there, files that do not change
from one drawing to the next."""

from __future__ import annotations

import functools
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dpscope.errors import UserError
from dpscope.reports.memory.data import is_private_only, label_of
from dpscope.reports.palette import colour_of
from dpscope.reports.tables import Row
from dpscope.reports.words import size_in_words, step_in_words
from dpscope.units import GIB, MIB

if TYPE_CHECKING:
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
    """As wide as a page, `height` inches high, drawn without a display or any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PAGE_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def settle(figure: Figure) -> None:
    """Fix the layout, so that what is placed by measured extents afterwards moves nothing."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)  # an engine that is done would still cost a drawing before each file


@styled
def save(figure: Figure, folder: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """One file a format, each replaced at once; a reader never sees half a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in formats:
        path = folder / f"{name}.{kind}"
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
        try:
            figure.savefig(temporary, format=kind, **FILES[kind])
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        paths.append(path)
    return paths


def parse_formats(text: str) -> tuple[str, ...]:
    """`png,svg` as asked for on a command line."""
    names = tuple(dict.fromkeys(name.strip().lower().lstrip(".") for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in FORMATS]:
        raise UserError(f"no figure format {', '.join(map(repr, unknown))}: choose from {', '.join(FORMATS)}")
    if not names:
        raise UserError(f"no figure format given: choose from {', '.join(FORMATS)}")
    return names


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit an axis is read in, and its size in bytes: the largest of which there are two."""
    units = ((float(GIB), "GiB"), (float(MIB), "MiB"), (1024.0, "KiB"))
    return next((unit for unit in units if largest >= 2 * unit[0]), (1.0, "B"))


def three_digits(value: float) -> str:
    """As much of a figure as a picture can show."""
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def set_title(figure: Figure, heading: str, rows: Sequence[Row], notes: Sequence[str]) -> None:
    lines = [heading, describe(rows), *notes]
    figure.suptitle("\n".join(line for text in lines for line in textwrap.wrap(text, 110)), fontsize=FONT)


def not_drawn(reasons: Sequence[tuple[Row, str]]) -> list[str]:
    """The note that names rows which a figure leaves out."""
    return [f"Not drawn: {', '.join(f'{row.method} ({reason})' for row, reason in reasons)}"] if reasons else []


def describe(rows: Sequence[Row]) -> str:
    """What a figure was measured on."""
    spec, environment = rows[0].first.spec, rows[0].first.environment
    where = environment.get("gpu") or environment.get("cpu")
    size = f"{spec['workload']['name']}, {size_in_words(spec)}, {step_in_words(spec)}"
    return size + (f"; {where}" if where else "")


def look_of(component: str) -> dict[str, Any]:
    """How a component is filled, wherever it is drawn."""
    hatch = "//////" if is_private_only(component) else None
    return {"facecolor": colour_of(component), "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}


def component_legend(figure: Figure, components: Sequence[str]) -> None:
    """Components in words, below the panels."""
    from matplotlib.patches import Patch

    patches = [
        Patch(label=label_of(key) + (" (private only)" if is_private_only(key) else ""), **look_of(key))
        for key in components
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, handlelength=1.6)

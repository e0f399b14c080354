"""What the figures of traffic share: a panel for each size, the same look for a method in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dpscope.reports.figures.style import FONT, SMALL, new_figure
from dpscope.reports.palette import method_colours, method_markers
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import Traffic
from dpscope.reports.words import size_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_HEIGHT = 0.55  # inches
WRAP = 110  # characters of a title's line


def make_panels(
    groups: Sequence[Sequence[Traffic]], *, columns: int, height: float
) -> tuple[Figure, Iterator[tuple[Axes, Sequence[Traffic]]]]:
    """A figure with a panel of `height` inches for each group of one size."""
    columns = min(columns, len(groups))
    lines = -(-len(groups) // columns)
    figure = new_figure(TITLE_HEIGHT + lines * height)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    for ax, group in zip(axes, groups, strict=False):
        if len(groups) > 1:
            ax.set_title(size_in_words(group[0].row.first.spec), fontsize=FONT if columns < 4 else SMALL)
    return figure, zip(axes, groups, strict=False)


def set_heading(figure: Figure, heading: str, groups: Sequence[Sequence[Traffic]], notes: Sequence[str]) -> None:
    """What is shown, of what and on what; an estimate is called one before anything else."""
    traffics = [traffic for group in groups for traffic in group]
    if all(traffic.estimated for traffic in traffics):
        heading += ": an ESTIMATE from tensor sizes, not measured"
    specs = [traffic.row.first.spec for traffic in traffics]
    told = ", ".join(
        "/".join(dict.fromkeys(values))
        for values in (
            [s["workload"]["name"] for s in specs],
            *([str(s[k]) for s in specs] for k in ("dtype", "optimizer")),
        )
    )
    size = f", {size_in_words(specs[0])}" if len(groups) == 1 else ""
    where = dict.fromkeys(
        str(environment.get("gpu") or environment.get("cpu"))
        for environment in (traffic.row.first.environment for traffic in traffics)
        if environment
    )
    lines = [heading, f"{told}{size}" + (f"; {', '.join(where)}" if where else ""), *notes]
    figure.suptitle("\n".join(line for text in lines for line in textwrap.wrap(text, WRAP)), fontsize=FONT)


class Looks:
    """The colour and the marker of a method among all methods."""

    def __init__(self, rows: Sequence[Row]) -> None:
        methods = [row.method for row in rows]
        self._colours, self._markers = method_colours(methods), method_markers(methods)

    def colour(self, method: str) -> str:
        return self._colours[method]

    def marker(self, method: str) -> str:
        return self._markers[method]

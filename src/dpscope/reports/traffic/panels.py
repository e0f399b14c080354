"""What the figures of traffic share: a panel for each size, below a heading that says what was measured where."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpscope.reports.figures.style import FONT, SMALL, new_figure
from dpscope.reports.traffic.data import Traffic
from dpscope.reports.words import size_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_HEIGHT = 0.55  # inches
WRAP = 110  # characters of a title's line

Groups = Sequence[Sequence[Traffic]]  # by size


def make_panels(groups: Groups, *, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of `height` inches for each group of one size."""
    columns = min(columns, len(groups))
    lines = -(-len(groups) // columns)
    figure = new_figure(TITLE_HEIGHT + lines * height)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    for ax, group in zip(axes, groups, strict=False):
        if len(groups) > 1:
            ax.set_title(group[0].row.size, fontsize=FONT if columns < 4 else SMALL)
    return figure, list(axes[: len(groups)])


def set_heading(figure: Figure, heading: str, groups: Groups, note: str) -> None:
    """What is shown, of what and on what; an estimate is called one before anything else."""
    traffics = [traffic for group in groups for traffic in group]
    if all(traffic.estimated for traffic in traffics):
        heading += ": an ESTIMATE from tensor sizes, not measured"
    results = [traffic.row.first for traffic in traffics]
    names = (
        [r.spec["workload"]["name"] for r in results],
        *([r.spec[k] for r in results] for k in ("dtype", "optimizer")),
    )
    measured = ["/".join(dict.fromkeys(values)) for values in names]
    if len(groups) == 1:
        measured.append(size_in_words(results[0].spec))
    where = dict.fromkeys(str(r.environment.get("gpu") or r.environment.get("cpu")) for r in results if r.environment)
    lines = [heading, "; ".join(filter(None, (", ".join(measured), ", ".join(where)))), note]
    figure.suptitle("\n".join(line for text in lines for line in textwrap.wrap(text, WRAP)), fontsize=FONT)

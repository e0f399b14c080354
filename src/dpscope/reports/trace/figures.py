"""Where the time goes: phases, kernel families and what a method adds to ordinary training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.doubt import marked
from dpscope.reports.figures import style
from dpscope.reports.output import figure_output
from dpscope.reports.palette import FAMILY_COLOURS, GREW, SHRANK, is_dark, phase_colour
from dpscope.reports.tables import Row
from dpscope.reports.trace import data
from dpscope.reports.words import operator_label, shorten
from dpscope.vocabulary.families import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_OPERATORS = 8  # operators of a method that are drawn


@style.styled
def draw_phases(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size: a bar a method, a segment a phase; None if none of them was traced."""
    steps = data.traced_steps(rows)
    gpu, series = data.on_gpu(steps), data.phase_series(steps)
    if not series:
        return None
    # Nobody should read a step's time off a bar that was drawn under a profiler.
    timed = [step.row for step in steps if step.row.median_ms]
    told = ", ".join(f"{row.method} {marked(f'{row.median_ms:.1f} ms', row.time_doubt)}" for row in timed)
    notes = [f"Unprofiled steps: {told}" if told else "Steps were not timed without the profiler"]
    notes += [] if gpu else [data.stretched_in_words(steps).removesuffix(".")]
    looks = {name: (name, phase_colour(name)) for name in series}
    title, axis = "Where the time of a training step goes", data.phase_axis(steps)
    return _draw_stacks(title, 1.5, steps, series, looks, axis, notes)


@style.styled
def draw_families(rows: Sequence[Row]) -> Figure | None:
    """Kernel time by family, a bar a method; None without a GPU trace."""
    steps = [step for step in data.traced_steps(rows) if step.trace.get("families")]
    series = data.family_series(steps)
    looks = {name: (FAMILY_LABELS.get(name, name), FAMILY_COLOURS.get(name, "#DDDDDD")) for name in series}
    axis = "milliseconds of kernels, copies and fills in a step"
    return _draw_stacks("What the GPU works on", 1.7, steps, series, looks, axis) if series else None


@style.styled
def draw_differences(rows: Sequence[Row]) -> Figure | None:
    """The operators that make each method's step longer than standard's, a panel a method."""
    found = [each for each in data.differences(data.traced_steps(rows)) if each.changes]
    if not found:
        return None
    figure = style.new_figure(0.9 + len(found) * (0.5 + 0.16 * (DRAWN_OPERATORS + 1)))
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for each, ax in zip(found, axes, strict=True):
        biggest, rest, _ = each.biggest(DRAWN_OPERATORS)
        values = [*(change.ms for change in biggest), rest]
        bars = ax.barh(range(len(values)), values, color=[GREW if value > 0 else SHRANK for value in values])
        ax.bar_label(bars, [f"{value:+.2f}" for value in values], padding=2, fontsize=style.SMALL)
        names = [operator_label(c.operator, 44) + (f" ({c.phase})" if c.phase else "") for c in biggest]
        ax.set_yticks(range(len(values)), [*names, "everything else"])
        ax.set_ylim(len(values) - 0.4, -0.6)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.margins(x=0.12)
        ax.set_title(f"{each.method}: {each.total_ms:+.2f} ms in all", loc="left", fontweight="bold")
    clock = "GPU time" if found[0].basis == data.GPU else "host time"
    axes[-1].set_xlabel(f"milliseconds more than standard ({clock})")
    title = "What a method's traced step takes beyond ordinary training, by operator"
    style.set_title(figure, title, style.describe(rows))
    style.settle(figure)
    return figure


def _draw_stacks(
    title: str,
    height: float,
    steps: Sequence[data.TracedStep],
    series: data.Series,
    looks: Mapping[str, tuple[str, str]],
    axis: str,
    notes: Sequence[str] = (),
) -> Figure:
    """A bar a method, a segment a name, in the label and colour it looks by. A segment wide enough for its figure
    carries it, and the total stands at the end."""
    figure = style.new_figure(height + 0.34 * len(steps))
    ax: Axes = figure.subplots()
    widest = max(sum(filter(None, times)) for times in zip(*series.values(), strict=True)) or 1.0
    small: dict[str, Any] = {"va": "center", "fontsize": style.SMALL}
    for place in range(len(steps)):
        left = 0.0
        for name, (_, colour) in looks.items():
            value = series[name][place] or 0.0
            ax.barh(place, value, left=left, height=0.62, color=colour, edgecolor="0.4", linewidth=0.4)
            if value > 0.05 * widest:
                inside: dict[str, Any] = {"ha": "center", "color": "white" if is_dark(colour) else "black", **small}
                ax.text(left + value / 2, place, style.three_digits(value), **inside)
            left += value
        ax.text(left + 0.01 * widest, place, style.three_digits(left), fontweight="bold", **small)
    ax.set_yticks(range(len(steps)), [shorten(step.method, 24) for step in steps])
    ax.set_ylim(len(steps) - 0.5, -0.5)
    ax.set_xlim(0, widest * 1.1)
    ax.set_xlabel(axis)
    patches = {label: {"facecolor": c, "edgecolor": "0.4", "linewidth": 0.4} for label, c in looks.values()}
    style.patch_legend(figure, patches, min(len(looks), 6))
    style.set_title(figure, title, style.describe([step.row for step in steps]), *notes)
    style.settle(figure)
    return figure


DRAWINGS = {
    "trace_phases": ("where the time of a step goes, by phase", draw_phases),
    "trace_families": ("what the GPU works on, by family of kernels", draw_families),
    "trace_differences": ("operators that make a step longer than standard's", draw_differences),
}
TRACE_FIGURES = tuple(figure_output(name, holds, draw, instrument="trace") for name, (holds, draw) in DRAWINGS.items())

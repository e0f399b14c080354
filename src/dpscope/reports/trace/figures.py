"""Where the time goes: phases, kernel families and what a method adds to ordinary training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dpscope.reports.doubt import marked
from dpscope.reports.figures.style import SMALL, new_figure, set_title, settle, styled, three_digits
from dpscope.reports.output import figure_output
from dpscope.reports.palette import FAMILY_COLOURS, GREW, SHRANK, is_dark, phase_colour
from dpscope.reports.tables import Row
from dpscope.reports.trace import data
from dpscope.reports.trace.text import operator_label
from dpscope.reports.words import shorten
from dpscope.vocabulary.families import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_OPERATORS = 8  # operators of a method that are drawn


@styled
def draw_phases(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size: a bar a method, a segment a phase; None if none of them was traced."""
    steps = data.traced_steps(rows)
    gpu, series = data.on_gpu(steps), data.phase_series(steps)
    if not series:
        return None
    figure = _draw_stacks(1.5, steps, series, {name: (name, phase_colour(name)) for name in series})
    figure.axes[0].set_xlabel("GPU milliseconds of an unprofiled step" if gpu else "milliseconds of a traced step")
    doubt = "" if gpu else data.stretched_in_words(steps).removesuffix(".")
    _set_title(figure, "Where the time of a training step goes", steps, _unprofiled(steps), doubt)
    return figure


def _unprofiled(steps: Sequence[data.TracedStep]) -> str:
    """Nobody should read a step's time off a bar that was drawn under a profiler."""
    timed = [(step.method, step.row.median_ms, step.row.time_doubt) for step in steps]
    told = ", ".join(f"{method} {marked(f'{median:.1f} ms', doubt)}" for method, median, doubt in timed if median)
    return f"Unprofiled steps: {told}" if told else "Steps were not timed without the profiler"


@styled
def draw_families(rows: Sequence[Row]) -> Figure | None:
    """Kernel time by family, a bar a method; None without a GPU trace."""
    steps = [step for step in data.traced_steps(rows) if step.trace.get("families")]
    series = data.family_series(steps)
    if not series:
        return None
    looks = {name: (FAMILY_LABELS.get(name, name), FAMILY_COLOURS.get(name, "#DDDDDD")) for name in series}
    figure = _draw_stacks(1.7, steps, series, looks)
    figure.axes[0].set_xlabel("milliseconds of kernels, copies and fills in a step")
    _set_title(figure, "What the GPU works on", steps)
    return figure


@styled
def draw_differences(rows: Sequence[Row]) -> Figure | None:
    """The operators that make each method's step longer than standard's, a panel a method."""
    found = [each for each in data.differences(data.traced_steps(rows)) if each.changes]
    if not found:
        return None
    figure = new_figure(0.9 + len(found) * (0.5 + 0.16 * (DRAWN_OPERATORS + 1)))
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for each, ax in zip(found, axes, strict=True):
        biggest, rest = each.biggest(DRAWN_OPERATORS)
        labels = [*map(_label, biggest), "everything else"]
        values = [*(change.ms for change in biggest), rest]
        bars = ax.barh(range(len(values)), values, color=[GREW if value > 0 else SHRANK for value in values])
        ax.bar_label(bars, [f"{value:+.2f}" for value in values], padding=2, fontsize=SMALL)
        ax.set_yticks(range(len(values)), labels)
        ax.set_ylim(len(values) - 0.4, -0.6)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.margins(x=0.12)
        ax.set_title(f"{each.method}: {each.total_ms:+.2f} ms in all", loc="left", fontweight="bold")
    axes[-1].set_xlabel(
        f"milliseconds more than standard ({'GPU time' if found[0].basis == data.GPU else 'host time'})"
    )
    set_title(figure, "What a method's traced step takes beyond ordinary training, by operator", rows, [])
    settle(figure)
    return figure


def _label(change: data.OperatorChange) -> str:
    return operator_label(change.operator, 44) + (f" ({change.phase})" if change.phase else "")


def _set_title(figure: Figure, heading: str, steps: Sequence[data.TracedStep], *notes: str) -> None:
    set_title(figure, heading, [step.row for step in steps], [note for note in notes if note])
    settle(figure)


def _draw_stacks(
    height: float, steps: Sequence[data.TracedStep], series: data.Series, looks: Mapping[str, tuple[str, str]]
) -> Figure:
    """A bar a method, a segment a name, in the label and colour it looks by. A segment wide enough for its figure
    carries it, and the total stands at the end."""
    from matplotlib.patches import Patch

    figure = new_figure(height + 0.34 * len(steps))
    ax: Axes = figure.subplots()
    widest = max(sum(filter(None, times)) for times in zip(*series.values(), strict=True)) or 1.0
    for place in range(len(steps)):
        left = 0.0
        for name, (_, colour) in looks.items():
            value = series[name][place] or 0.0
            ax.barh(place, value, left=left, height=0.62, color=colour, edgecolor="0.4", linewidth=0.4)
            if value > 0.05 * widest:
                ink = "white" if is_dark(colour) else "black"
                middle = left + value / 2
                ax.text(middle, place, three_digits(value), ha="center", va="center", color=ink, fontsize=SMALL)
            left += value
        ax.text(left + 0.01 * widest, place, three_digits(left), va="center", fontsize=SMALL, fontweight="bold")
    ax.set_yticks(range(len(steps)), [shorten(step.method, 24) for step in steps])
    ax.set_ylim(len(steps) - 0.5, -0.5)
    ax.set_xlim(0, widest * 1.1)
    patches = [Patch(facecolor=c, edgecolor="0.4", linewidth=0.4, label=label) for label, c in looks.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(looks), 6), frameon=False)
    return figure


DRAWINGS = {
    "trace_phases": ("where the time of a step goes, by phase", draw_phases),
    "trace_families": ("what the GPU works on, by family of kernels", draw_families),
    "trace_differences": ("operators that make a step longer than standard's", draw_differences),
}
TRACE_FIGURES = tuple(figure_output(name, holds, draw, instrument="trace") for name, (holds, draw) in DRAWINGS.items())

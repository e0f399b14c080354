"""Where the time goes: phases, kernel families and what a method adds to ordinary training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dpscope.reports.doubt import marked
from dpscope.reports.figures.style import SMALL, new_figure, set_title, settle, styled, three_digits
from dpscope.reports.output import figure_output
from dpscope.reports.palette import FAMILY_COLOURS, GREW, SHRANK, is_dark, phase_colour
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import (
    IDLE,
    Change,
    differences,
    on_gpu,
    phase_names,
    phase_times,
    stretched_in_words,
    trace_of,
)
from dpscope.reports.trace.text import operator_label
from dpscope.reports.words import shorten
from dpscope.vocabulary.families import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 8  # operators of a method that are drawn


@styled
def draw_phases(rows: Sequence[Row]) -> Figure | None:
    """Rows of one size: a bar a method, a segment a phase; None if none of them was traced."""
    shown = [row for row in rows if trace_of(row)]
    if not shown:
        return None
    gpu = on_gpu(shown)
    figure = new_figure(1.5 + 0.34 * len(shown))
    ax = figure.subplots()
    parts = [phase_times(row, gpu=gpu) for row in shown]
    names = [*phase_names(shown), *([IDLE] if gpu else [])]
    colours = {name: phase_colour(name) for name in names if any(times.get(name) for times in parts)}
    _stack(ax, [row.method for row in shown], parts, colours)
    ax.set_xlabel("GPU milliseconds of an unprofiled step" if gpu else "milliseconds of a traced step")
    doubt = "" if gpu else stretched_in_words(shown).removesuffix(".")
    notes = [_unprofiled(shown), *([doubt] if doubt else [])]
    set_title(figure, "Where the time of a training step goes", shown, notes)
    _legend(figure, colours)
    settle(figure)
    return figure


def _unprofiled(rows: Sequence[Row]) -> str:
    """Nobody should read a step's time off a bar that was drawn under a profiler."""
    told = ", ".join(
        f"{row.method} {marked(f'{row.median_ms:.1f} ms', row.time_doubt)}" for row in rows if row.median_ms
    )
    return f"Unprofiled steps: {told}" if told else "Steps were not timed without the profiler"


@styled
def draw_families(rows: Sequence[Row]) -> Figure | None:
    """Kernel time by family, a bar a method; None without a GPU trace."""
    shown = [row for row in rows if trace_of(row).get("families")]
    if not shown:
        return None
    parts = [{part["family"]: part["ms"] for part in trace_of(row)["families"]} for row in shown]
    names = sorted({name for times in parts for name in times}, key=lambda n: -max(t.get(n, 0.0) for t in parts))
    colours = {name: FAMILY_COLOURS.get(name, "#DDDDDD") for name in names}
    figure = new_figure(1.7 + 0.34 * len(shown))
    ax = figure.subplots()
    _stack(ax, [row.method for row in shown], parts, colours)
    ax.set_xlabel("milliseconds of kernels, copies and fills in a step")
    set_title(figure, "What the GPU works on", shown, [])
    _legend(figure, colours, FAMILY_LABELS)
    settle(figure)
    return figure


@styled
def draw_differences(rows: Sequence[Row]) -> Figure | None:
    """The operators that make each method's step longer than standard's, a panel a method."""
    found = [each for each in differences(rows) if each.changes]
    if not found:
        return None
    figure = new_figure(0.9 + len(found) * (0.5 + 0.16 * (MOST + 1)))
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for each, ax in zip(found, axes, strict=True):
        biggest, rest = each.biggest(MOST)
        labels = [_label(change) for change in biggest] + ["everything else"]
        values = [change.ms for change in biggest] + [rest]
        bars = ax.barh(range(len(values)), values, color=[GREW if value > 0 else SHRANK for value in values])
        ax.bar_label(bars, [f"{value:+.2f}" for value in values], padding=2, fontsize=SMALL)
        ax.set_yticks(range(len(values)), labels)
        ax.set_ylim(len(values) - 0.4, -0.6)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.margins(x=0.12)
        ax.set_title(f"{each.method}: {each.total_ms:+.2f} ms in all", loc="left", fontweight="bold")
    axes[-1].set_xlabel(f"milliseconds more than standard ({'GPU time' if found[0].basis == 'gpu' else 'host time'})")
    set_title(figure, "What a method's traced step takes beyond ordinary training, by operator", rows, [])
    settle(figure)
    return figure


def _label(change: Change) -> str:
    return operator_label(change.operator, 44) + (f" ({change.phase})" if change.phase else "")


def _stack(ax: Axes, methods: Sequence[str], parts: Sequence[dict[str, float]], colours: dict[str, str]) -> None:
    """Horizontal bars; a segment wide enough for its figure carries it, and the total stands at the end."""
    widest = max(sum(times.values()) for times in parts) or 1.0
    for place, times in enumerate(parts):
        left = 0.0
        for name, colour in colours.items():
            value = times.get(name, 0.0)
            ax.barh(place, value, left=left, height=0.62, color=colour, edgecolor="0.4", linewidth=0.4)
            if value > 0.05 * widest:
                ink = "white" if is_dark(colour) else "black"
                ax.text(
                    left + value / 2, place, three_digits(value), ha="center", va="center", color=ink, fontsize=SMALL
                )
            left += value
        ax.text(left + 0.01 * widest, place, three_digits(left), va="center", fontsize=SMALL, fontweight="bold")
    ax.set_yticks(range(len(methods)), [shorten(method, 24) for method in methods])
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_xlim(0, widest * 1.1)


def _legend(figure: Figure, colours: Mapping[str, str], labels: Mapping[str, str] | None = None) -> None:
    from matplotlib.patches import Patch

    words = {name: (labels or {}).get(name, name) for name in colours}
    patches = [Patch(facecolor=c, edgecolor="0.4", linewidth=0.4, label=words[n]) for n, c in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(colours), 6), frameon=False)


DRAWINGS = {
    "trace_phases": ("where the time of a step goes, by phase", draw_phases),
    "trace_families": ("what the GPU works on, by family of kernels", draw_families),
    "trace_differences": ("operators that make a step longer than standard's", draw_differences),
}
TRACE_FIGURES = tuple(figure_output(name, holds, draw, instrument="trace") for name, (holds, draw) in DRAWINGS.items())

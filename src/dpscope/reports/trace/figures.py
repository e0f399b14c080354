"""Where the time goes: phases, kernel families and what a method adds to ordinary training; and a captured timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.doubt import marked
from dpscope.reports.figures.bars import BarPanel, draw_bars, filled
from dpscope.reports.figures.style import describe, new_figure, styled
from dpscope.reports.output import figure_output
from dpscope.reports.palette import (
    DIRECTION_COLOURS,
    FAMILY_COLOURS,
    GREW,
    INDIGO,
    PRIVATE_FAMILIES,
    is_dark,
    phase_colour,
)
from dpscope.reports.tables import Row
from dpscope.reports.trace import data
from dpscope.reports.trace.charts import operators, phases
from dpscope.results.trace_difference import GPU
from dpscope.units import three_digits
from dpscope.vocabulary.families import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


def draw_phases(rows: Sequence[Row]) -> Figure | None:
    """Return the chart of phases, of rows of one size."""
    chart, steps = phases(rows), data.traced_steps(rows)
    if chart is None:
        return None
    # A bar drawn under a profiler should not be read as a step time.
    timed = [step.row for step in steps if step.row.median_ms]
    told = ", ".join(f"{row.method} {marked(f'{row.median_ms:.1f} ms', row.time_doubt)}" for row in timed)
    notes = [f"Unprofiled steps: {told}" if told else "Steps were not timed without the profiler"]
    notes += [] if data.on_gpu(steps) else [data.stretched_in_words(steps).removesuffix(".")]
    shown = chart.views[0].data
    series = {part["phase"]: part["ms"] for part in shown["parts"]}
    looks = {part["phase"]: filled(part["colour"]) for part in shown["parts"]}
    return _draw_stacks(steps, series, looks, shown["axis"], ["Where the time of a training step goes", *notes])


def draw_families(rows: Sequence[Row]) -> Figure | None:
    """Draw kernel time by family, a bar a method; None without a GPU trace."""
    steps = [step for step in data.traced_steps(rows) if step.trace.get("families")]
    found = data.family_series(steps)
    if not found:
        return None
    series = {FAMILY_LABELS.get(name, name): times for name, times in found.items()}
    looks = [filled(FAMILY_COLOURS.get(name, "#DDDDDD"), name in PRIVATE_FAMILIES) for name in found]
    axis = "milliseconds of kernels, copies and fills in a step"
    return _draw_stacks(steps, series, dict(zip(series, looks, strict=True)), axis, ["What the GPU works on"])


def _draw_stacks(
    steps: Sequence[data.TracedStep], series: data.Series, looks: dict[str, Any], axis: str, told: Sequence[str]
) -> Figure:
    """Draw stacks; `told`: the title and its notes."""
    totals = [three_digits(sum(filter(None, times))) for times in zip(*series.values(), strict=True)]
    panel = BarPanel(names=[step.method for step in steps], parts=series, ends=totals, axis=axis)
    return draw_bars([told[0], describe([step.row for step in steps]), *told[1:]], [panel], looks)


def draw_differences(rows: Sequence[Row]) -> Figure | None:
    """Return the chart of operators that grew, of rows of one size: a panel a method."""
    chart, found = operators(rows), data.differences(data.traced_steps(rows))
    if chart is None:
        return None
    shown = chart.views[0].data
    clock = "GPU time" if found[0].basis == GPU else "host time"
    panels = []
    for panel in shown["panels"]:
        bars = panel["bars"]
        more, less = ([bar["ms"] if (bar["ms"] > 0) is grew else None for bar in bars] for grew in (True, False))
        panels.append(
            BarPanel(
                names=[f"{bar['label']} ({bar['phase']})" if bar["phase"] else bar["label"] for bar in bars],
                parts={"longer": more, "shorter": less},
                ends=[f"{bar['ms']:+.2f}" for bar in bars],
                axis=f"milliseconds more than standard ({clock})",
                title=f"{panel['method']}: {panel['total_ms']:+.2f} ms in all",
                inside=False,
            )
        )
    looks = {"longer": filled(shown["grew"]), "shorter": filled(shown["shrank"])}
    title = "What a method's traced step takes beyond ordinary training, by operator"
    return draw_bars([title, describe(rows)], panels, looks)


DRAWINGS = {
    "trace_phases": ("where step time goes, by phase", draw_phases),
    "trace_families": ("what the GPU works on, by family of kernels", draw_families),
    "trace_differences": ("operators that make a step longer than standard's", draw_differences),
}
TRACE_FIGURES = tuple(figure_output(name, holds, draw, instrument="trace") for name, (holds, draw) in DRAWINGS.items())


LANE_HEIGHT = 0.8  # height; lanes are 1 apart
NAMED_SHARE = 0.06  # of the width: shorter ranges are not named
EVENT_LOOKS = {
    "call": ("#BBBBBB", "CUDA call"),
    "wait": (GREW, "waits for the GPU"),
    "kernel": (INDIGO, "kernel"),
    "copy": (DIRECTION_COLOURS["written"], "copy"),
    "memset": ("#DDCC77", "memset"),
}


@styled
def draw_capture(lanes: DataFrame, *, title: str = "", window_ms: tuple[float, float] | None = None) -> Figure:
    """Draw what `dpscope.instruments.nsys.views.lanes` made of a capture, from above: ranges, CUDA calls, streams.

    `window_ms`: start and end, counted from the first event; by default the whole capture.
    """
    left, right = window_ms or (0.0, float((lanes["start_ms"] + lanes["ms"]).max()))
    inside = lanes[(lanes["start_ms"] + lanes["ms"] >= left) & (lanes["start_ms"] <= right)]
    names = list(dict.fromkeys(lanes["lane"]))
    figure = new_figure(0.9 + 0.34 * len(names))
    ax = figure.subplots()
    labels = {kind: label for kind, (_, label) in EVENT_LOOKS.items()}
    for (lane, kind), events in inside.groupby(["lane", "kind"], sort=False):
        place = names.index(lane)
        if kind == "range":
            _draw_ranges(ax, events, place, (left, right))
            continue
        spans = list(zip(events["start_ms"], events["ms"], strict=True))
        # No outline and no rounding to pixels: a kernel of a microsecond is as faint as it is short.
        look: dict[str, Any] = {"color": EVENT_LOOKS[kind][0], "linewidth": 0, "snap": False}
        ax.broken_barh(spans, (place - LANE_HEIGHT / 2, LANE_HEIGHT), label=labels.pop(kind, None), **look)
    ax.set(yticks=range(len(names)), yticklabels=names, xlim=(left, right), xlabel="milliseconds", title=title)
    ax.set_ylim(len(names) - 0.5, -0.5)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure


def _draw_ranges(ax: Axes, events: DataFrame, place: int, window: tuple[float, float]) -> None:
    """Draw bars of NVTX ranges, with their names if there is room."""
    left, right = window
    for name, start, length in zip(events["name"], events["start_ms"], events["ms"], strict=True):
        colour, lane = phase_colour(name), (place - LANE_HEIGHT / 2, LANE_HEIGHT)
        ax.broken_barh([(start, length)], lane, color=colour, edgecolor="white", linewidth=0.5)
        first, last = max(start, left), min(start + length, right)
        if last - first > NAMED_SHARE * (right - left):
            ink = "white" if is_dark(colour) else "black"
            ax.text((first + last) / 2, place, name, ha="center", va="center", fontsize=7, color=ink, clip_on=True)

"""Figures of time: phases, kernel families and what a method adds to ordinary training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.doubt import marked
from dpscope.reports.figures.bars import BarPanel, draw_bars, filled
from dpscope.reports.figures.style import describe
from dpscope.reports.output import figure_output
from dpscope.reports.palette import FAMILY_COLOURS, PRIVATE_FAMILIES
from dpscope.reports.tables import Row
from dpscope.reports.trace import data
from dpscope.reports.trace.charts import operators, phases
from dpscope.results.trace_difference import GPU
from dpscope.units import three_digits
from dpscope.vocabulary.families import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

"""The figures of memory."""

from __future__ import annotations

from dpscope.reports.memory.breakdown_figure import draw_breakdown
from dpscope.reports.memory.timeline_figure import draw_timeline
from dpscope.reports.output import figure_output

MEMORY_FIGURES = (
    figure_output("memory_breakdown_comparison", "the peak of each method by component", draw_breakdown),
    figure_output("memory_timeline", "live bytes by component over a step", draw_timeline),
)

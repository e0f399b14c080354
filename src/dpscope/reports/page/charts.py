"""The page's charts, in their order: one file a chart, each a pure function of the rows of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpscope.reports.memory.charts import memory_peak, memory_timeline, tensors_at_peak
from dpscope.reports.page.chart import Chart, ChartOf
from dpscope.reports.report import Setting
from dpscope.reports.time.charts import scaling_over_batch, scaling_over_sequence, step_time, tradeoff
from dpscope.reports.trace.charts import operators, phases
from dpscope.reports.trace.layers_chart import layers_memory, layers_time
from dpscope.reports.traffic.charts import roofline, traffic

CHARTS: tuple[ChartOf, ...] = (
    # what it costs
    step_time,
    memory_peak,
    traffic,
    tradeoff,
    # where it goes
    phases,
    operators,
    memory_timeline,
    tensors_at_peak,
    layers_memory,
    layers_time,
    roofline,
    # how it grows
    scaling_over_batch,
    scaling_over_sequence,
)


def make_charts(settings: Sequence[Setting]) -> list[Chart]:
    """Each chart with its views of every setting: a size in words names one comparison only within a setting."""
    made = ([(setting.label, chart) for setting in settings if (chart := make(setting.rows))] for make in CHARTS)
    return [_over_settings(charts) for charts in made if charts]


def _over_settings(charts: Sequence[tuple[str, Chart]]) -> Chart:
    first, views = charts[0][1], []
    for label, chart in charts:
        title = "" if chart.title == first.title else chart.title
        how = "" if chart.how == first.how else chart.how
        views += [replace(view, setting=label, title=title, how=how) for view in chart.views]
    return replace(first, views=views)

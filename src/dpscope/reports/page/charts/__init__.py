"""The page's charts, in their order: one file a chart, each a pure function of the rows of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpscope.reports.page.chart import Chart
from dpscope.reports.page.charts.layers import layers_memory, layers_time
from dpscope.reports.page.charts.memory_peak import memory_peak
from dpscope.reports.page.charts.memory_timeline import memory_timeline
from dpscope.reports.page.charts.time import step_time
from dpscope.reports.tables import Row

# None where no row has figures for it.
CHARTS: tuple[Callable[[Sequence[Row]], Chart | None], ...] = (
    step_time,
    memory_peak,
    memory_timeline,
    layers_memory,
    layers_time,
)


def make_charts(rows: Sequence[Row]) -> list[Chart]:
    return [chart for make in CHARTS if (chart := make(rows))]

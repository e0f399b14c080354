"""The page's charts, in their order: one file a chart, each a pure function of the rows of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpscope.reports.page.chart import Chart
from dpscope.reports.page.charts.operators import operators
from dpscope.reports.page.charts.phases import phases
from dpscope.reports.page.charts.roofline import roofline
from dpscope.reports.page.charts.scaling import scaling_over_batch, scaling_over_sequence
from dpscope.reports.page.charts.time import step_time
from dpscope.reports.page.charts.tradeoff import tradeoff
from dpscope.reports.page.charts.traffic import traffic
from dpscope.reports.tables import Row

# None where no row has figures for it.
CHARTS: tuple[Callable[[Sequence[Row]], Chart | None], ...] = (
    step_time,
    tradeoff,
    scaling_over_batch,
    scaling_over_sequence,
    phases,
    operators,
    traffic,
    roofline,
)


def make_charts(rows: Sequence[Row]) -> list[Chart]:
    return [chart for make in CHARTS if (chart := make(rows))]

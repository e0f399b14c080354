"""The page's charts, in their order: one file a chart, each a pure function of the rows of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dpscope.reports.page.chart import Chart
from dpscope.reports.page.charts.time import step_time
from dpscope.reports.page.settings import Setting, group_by_setting
from dpscope.reports.tables import Row

# None where no row has figures for it.
CHARTS: tuple[Callable[[Sequence[Row]], Chart | None], ...] = (step_time,)


def make_charts(rows: Sequence[Row]) -> list[Chart]:
    """Each chart with its views of every setting: a size in words names one comparison only within a setting."""
    settings = group_by_setting(rows)
    return [chart for make in CHARTS if (chart := _over_settings(make, settings))]


def _over_settings(make: Callable[[Sequence[Row]], Chart | None], settings: Sequence[Setting]) -> Chart | None:
    made = [(setting.label, chart) for setting in settings if (chart := make(setting.rows))]
    views = [replace(view, setting=label) for label, chart in made for view in chart.views]
    return replace(made[0][1], views=views) if made else None

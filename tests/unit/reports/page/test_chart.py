"""Charts: a view for each size, and how it was measured."""

from __future__ import annotations

import pytest

from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.page.render import make_charts
from dpscope.reports.report import Report, compare_results
from tests.unit.reports.traffic_results import results_for


@chart_by_size(key="speed", title="Speed", nav_label="Speed", how="Counted by hand. It does not see stops.")
def speed(rows):
    return View(says=rows[0].method, data={}, table=Table(columns=(), rows=())) if rows[0].median_ms else None


def test_a_chart_says_how_it_was_measured(make_result):
    chart = speed(compare_results([make_result()]))
    assert (chart.key, chart.kind, chart.how) == ("speed", "speed", "Counted by hand. It does not see stops.")


def test_each_size_is_a_view_and_one_without_figures_is_left_out(make_result):
    rows = compare_results([make_result(), make_result(batch_size=4), make_result(batch_size=8, status="oom")])
    assert [view.size for view in speed(rows).views] == ["batch 2, sequence 8", "batch 4, sequence 8"]
    assert speed(rows[2:]) is None


@pytest.mark.parametrize("kernels", [False, True])
def test_every_chart_says_what_it_does_not_see(kernels, measured_both_ways):
    made = [*make_charts(Report.of(measured_both_ways()).settings)]
    made += make_charts(Report.of(results_for(per_kernel=kernels)).settings)
    assert len(made) > 5
    assert [chart.key for chart in made if "does not see" not in chart.how] == []

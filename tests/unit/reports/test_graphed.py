"""Rows that are CUDA graphs: divided by ordinary training as a graph, and beside it by eager ordinary training."""

from __future__ import annotations

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.export import line_identity, to_records
from dpscope.reports.page.table import make_table
from dpscope.reports.report import Report, compare_results
from dpscope.reports.text import summary


@pytest.fixture
def results(make_result):
    def made(method, median, **settings):
        return make_result(method=method, median=median, device="cuda", **settings)

    compiled = {"cuda_graph": True, "compile": "default"}
    return [
        made("standard", 100.0),
        made("flash", 130.0),
        made("standard", 40.0, cuda_graph=True),
        made("flash", 42.0, cuda_graph=True),
        made("standard", 30.0, **compiled),
        made("flash", 33.0, **compiled),
    ]


def test_a_graph_is_divided_by_ordinary_training_as_a_graph_and_by_eager_ordinary_training(results):
    rows = compare_results(results)
    assert [row.time_ratio for row in rows] == [1.0, 1.3, 1.0, 1.05, 1.0, 1.1]
    assert [row.eager_time_ratio for row in rows] == [None, None, 0.4, 0.42, 0.3, 0.33]


def test_the_summary_the_page_and_exports_tell_both_ratios(results):
    words = " ".join(render_plain(summary(Report.of(results[:4]))).split())
    assert "ordinary training as a CUDA graph, and 0.42× the time of eager" in words
    assert "× of rows (CUDA graph) is the ratio to standard (CUDA graph)" in words
    headings = [name for name, _ in make_table(Report.of(results[:4])).columns]
    assert {"cuda graph", "time × eager"} <= set(headings)
    rows = compare_results(results[:4])
    assert to_records(rows)[-1]["time_ratio_to_eager"] == 0.42
    assert to_records(rows)[-1]["cuda_graph"] is True
    assert "cuda_graph" in line_identity(rows)
    assert "cuda_graph" not in line_identity(rows[:2])

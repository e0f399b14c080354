"""The largest tensors at the peak, in text and on the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.memory.figures import tensors_at_peak
from dpscope.reports.memory.text import SHOWN_TENSORS, tensors_of
from dpscope.reports.report import Report, compare_results
from dpscope.reports.text import summary

MIB = 2**20


@pytest.fixture
def rows(make_memory_result):
    return compare_results([make_memory_result(method) for method in ("standard", "flat")])


def test_the_text_names_size_shape_use_maker_and_line(make_memory_result):
    text = render_plain(summary(Report.of([make_memory_result("standard"), make_memory_result("flat")])), width=160)
    lines = text.partition("Largest tensors at the peak: batch 2, sequence 8")[2].splitlines()
    first = next(line for line in lines if line.startswith("standard"))
    words = "standard 200.0 MiB 8×26214400 float32 optimizer states blocks.*.up · addmm model.py:12"
    assert " ".join(first.split()) == words
    assert any("150.0 MiB  × 2" in line and "activations" in line for line in lines)
    assert any("model.py:12, backward" in line for line in lines)
    assert len([line for line in lines if " MiB " in line and "float32" in line]) == 2 * SHOWN_TENSORS


def test_the_page_draws_them_and_its_table_adds_up_to_the_tracked_peak(rows):
    chart = tensors_at_peak(rows)
    (view,) = chart.views
    assert [panel["method"] for panel in view.data["panels"]] == ["standard", "flat"]
    assert "The largest of standard: it is 200.0 MiB (8×26214400 float32, optimizer states" in view.says
    for row in rows:
        told = [line for line in view.table.rows if line[0] == row.method]
        assert sum(line[1] * line[2] for line in told) == row.measured["memory"].memory["tracked_peak_bytes"]


def test_results_without_tensors_have_no_such_part(make_memory_result):
    result = make_memory_result("standard")
    older = replace(result, memory={key: part for key, part in result.memory.items() if key != "tensors"})
    (row,) = compare_results([older])
    assert tensors_of(row) is None and tensors_at_peak([row]) is None
    assert "Largest tensors" not in render_plain(summary(Report.of([older])))

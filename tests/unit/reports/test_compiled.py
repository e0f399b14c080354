"""Compiled rows beside eager ones: each has its own denominator, and compiled ones a second ratio."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.against.data import set_against
from dpscope.reports.export import line_identity, to_latex, to_records
from dpscope.reports.page.table import make_table
from dpscope.reports.report import Report, compare_results
from dpscope.reports.text import summary


def compiled(result, seconds=21.4):
    found = {"seconds": seconds, "graphs": 1, "graph_breaks": 0, "recompiles": 0}
    return replace(result, timing={**result.timing, "compilation": found})


@pytest.fixture
def results(make_result):
    return [
        make_result(method="standard", median=100.0, peak=100 * 2**20),
        make_result(method="flash", median=110.0, peak=100 * 2**20),
        compiled(make_result(method="standard", median=80.0, peak=90 * 2**20, compile="default")),
        compiled(make_result(method="flash", median=84.0, peak=99 * 2**20, compile="default"), seconds=95.0),
    ]


def test_compiled_flash_is_divided_by_compiled_standard_and_by_eager_standard(results):
    rows = compare_results(results)
    assert [row.time_ratio for row in rows] == [1.0, 1.1, 1.0, 1.05]
    assert [row.eager_time_ratio for row in rows] == [None, None, 0.8, 0.84]
    assert [row.memory_ratio for row in rows] == [1.0, 1.0, 1.0, 1.1]
    assert [row.eager_memory_ratio for row in rows] == [None, None, 0.9, 0.99]


@pytest.mark.parametrize("difference", [{"batch_size": 3}, {"dtype": "bf16"}, {"compile": "max-autotune"}])
def test_eager_standard_of_something_else_is_no_denominator(make_result, difference):
    rows = compare_results([make_result(**difference), make_result(method="flash", compile="default")])
    assert rows[1].eager_time_ratio is None
    assert rows[1].time_ratio is None


def test_the_summary_tells_both_ratios_and_the_seconds_of_compilation(results):
    text = render_plain(summary(Report.of(results)))
    lines = text.splitlines()
    (flash,) = (line for line in lines if line.startswith("flash") and " compiled " in line)
    assert "1.05×" in flash
    assert "0.84×" in flash
    assert "× eager" in text
    words = " ".join(text.split())
    assert "1.05× the time and 1.10× the memory of compiled ordinary training, and 0.84× the time of eager" in words
    assert "standard 21 s, flash 1 min 35 s" in words


def test_the_page_s_table_has_columns_for_them_only_where_rows_are_compiled(results):
    headings = [name for name, _ in make_table(Report.of(results)).columns]
    assert {"compile", "time × eager", "memory × eager", "compiling"} <= set(headings)
    eager = [name for name, _ in make_table(Report.of(results[:2])).columns]
    assert not {"compile", "time × eager", "memory × eager", "compiling"} & set(eager)


def test_exports_hold_them_only_where_rows_are_compiled(results):
    record = to_records(compare_results(results))[-1]
    assert record["compile"] == "default"
    assert record["time_ratio_to_eager"] == 0.84
    assert (record["compile_seconds"], record["compile_graphs"], record["compile_recompiles"]) == (95.0, 1, 0)
    assert not [name for name in to_records(compare_results(results[:2]))[0] if "compile" in name or "eager" in name]


def test_a_paper_s_table_tells_both_ratios(results):
    assert r"time ($\times$ eager)" in to_latex(compare_results(results))
    assert "eager" not in to_latex(compare_results(results[:2]))


def test_the_table_says_how_a_model_runs_beside_the_method(results):
    assert [name for name, _ in make_table(Report.of(results)).columns][:3] == ["method", "compile", "time ×"]


def test_lines_of_every_csv_tell_eager_from_compiled_where_both_are_there(results):
    assert line_identity(compare_results(results))[-1] == "compile"
    assert "compile" not in line_identity(compare_results(results[:2]))


def test_a_heading_without_a_column_for_it_says_that_a_row_is_compiled(results):
    rows = compare_results(results)
    assert [row.where for row in rows[1:3]] == ["batch 2, sequence 8", "batch 2, sequence 8, compiled"]


def test_two_sweeps_are_paired_eager_with_eager_and_compiled_with_compiled(results, make_result):
    before = [make_result(method="flash", median=168.0, peak=99 * 2**20, compile="default")]
    found = set_against(Report.of(results), Report.of(before), names=("now", "before"))
    (pair,) = [pair for pair in found.pairs if pair.before is not None and pair.now is not None]
    assert pair.now.field("compile") == "default"


def test_peaks_of_eager_and_compiled_rows_are_compared_by_the_allocator_s_figure(make_result):
    eager = make_result(peak=100, instrument="memory")
    eager = replace(eager, memory={"source": "tracker", "peak_bytes": 100, "allocator_peak_bytes": 120})
    row = make_result(peak=60, instrument="memory", compile="default")
    row = replace(row, memory={"source": "compiled", "peak_bytes": 60, "allocator_peak_bytes": 60})
    assert compare_results([eager, row])[1].eager_memory_ratio == 0.5

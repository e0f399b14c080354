"""The part of the summary on traces: what it shows, and that it adds up."""

from __future__ import annotations

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.report import Report
from dpscope.reports.text import summary
from tests.unit.reports.trace_results import FLAT, GPU, STANDARD, make_trace, operator
from tests.unit.reports.writing import report_of


def printed(found):
    return render_plain(summary(report_of(found)))


def test_the_summary_shows_traced_and_unprofiled_steps_side_by_side(rows):
    text = printed(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT, 2.5)))
    assert "traced step          8.00  18.50" in text
    assert "unprofiled step     10.00  10.00" in text
    assert "flat against standard: +10.50 ms a traced step" in text
    whole = next(line for line in text.splitlines() if line.startswith("the whole step"))
    assert whole.split()[-3:] == ["8.00", "18.50", "+10.50"]


def test_the_summary_of_a_gpu_says_busy_idle_and_whether_it_waits_for_the_host(rows):
    text = printed(rows(median=100.0, standard=make_trace(GPU, 0.0, idle=94.0)))
    assert "standard is launch-bound: the GPU works in 6% of the unprofiled step" in text
    assert "standard: no wait for the GPU within a step." in text


def test_gpu_columns_sum_to_the_traced_step_when_streams_overlap_too(rows):
    text = printed(rows(standard=make_trace(GPU, 1.5, idle=4.0)))
    lines = {line.rpartition("  ")[0].strip(): line.rpartition(" ")[2] for line in text.splitlines()}
    assert (lines["GPU idle"], lines["less: side by side"]) == ("4.00", "-1.50")
    assert ["traced", "step", "8.50", "8.50"] in [line.split() for line in text.splitlines()]


def test_what_was_asked_for_beside_times_is_told(rows):
    trace = make_trace(STANDARD)
    trace["modules"] = [
        {"module": name, "cpu_ms": ms, "gpu_ms": 0.0, "phases": {"forward": ms}}
        for name, ms in (("(no module)", 9.0), ("head", 4.0))
    ]
    asked = {"operator": "aten::bmm", "device": "cpu", "allocations": 1.0, "allocated_bytes": 3 * 2**20}
    trace["memory"] = {"operators": [asked], "over_time": {}}
    trace["flops"] = {"aten::mm": 3e9, "aten::bmm": 1e9}
    text = " ".join(printed(rows(median=10.0, standard=trace)).split())
    assert "most expensive modules, forward and backward: head 4.0 ms." in text
    assert "ask for most memory in a step: aten::bmm 3.0 MiB." in text
    assert "4.00 GFLOP counted in a step, 0.4 TFLOP/s of the unprofiled step." in text


def test_a_long_difference_is_cut_and_still_adds_up(rows):
    many = [operator(f"aten::op{n}", "clip", 1.0 + n) for n in range(30)]
    text = printed(rows(standard=make_trace(STANDARD), flat=make_trace(many)))
    lines = text.partition("flat against standard")[2].splitlines()[2:]
    table = lines[: 1 + next(n for n, line in enumerate(lines) if line.startswith("the whole step"))]
    shown = [float(line.split()[-1]) for line in table[:-1]]
    assert len(shown) == 12
    assert sum(shown) == pytest.approx(float(table[-1].split()[-1].removesuffix("?")), abs=0.06)


def test_rows_without_traces_add_nothing_to_the_summary(make_result):
    assert "traced" not in render_plain(summary(Report.of([make_result()])))

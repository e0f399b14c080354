"""Which rows have a trace, what it is compared with, and whether the GPU waits for the host."""

from __future__ import annotations

import pytest

from dpscope.reports.outputs import write_reports
from dpscope.reports.trace import data
from dpscope.reports.trace.data import differences, traced_step, traced_steps
from tests.unit.reports.trace_results import FLAT, GPU, STANDARD, make_trace
from tests.unit.reports.writing import report_of


def test_without_a_traced_standard_there_is_no_difference(rows):
    assert differences(traced_steps(rows(flat=make_trace(FLAT)))) == []


def test_standard_alone_differs_from_nothing(rows):
    assert differences(traced_steps(rows(standard=make_trace(STANDARD)))) == []


@pytest.mark.parametrize(("median", "bound"), [(6.1, False), (7.4, False), (7.6, True), (60.0, True)])
def test_launch_bound_is_decided_by_kernel_time_in_the_unprofiled_step(rows, median, bound):
    (row,) = rows(median=median, standard=make_trace(GPU, 0.0, idle=100.0))
    says = f"launch-bound: the GPU works in {6.0 / median:.0%} of the unprofiled step"
    assert traced_step(row).bound == (f"{says}; the rest it waits for the host" if bound else f"not {says}")


def test_without_an_unprofiled_time_the_traced_step_decides_and_says_so(rows):
    (row,) = rows(median=None, standard=make_trace(GPU, 0.0, idle=6.0))
    assert traced_step(row).bound.startswith(
        "launch-bound: the GPU works in 50% of the traced step, which the profiler"
    )


def test_a_cpu_row_is_neither_launch_bound_nor_not(rows):
    (row,) = rows(standard=make_trace(STANDARD))
    assert traced_step(row).bound == ""


def test_text_page_figures_and_log_of_a_report_compute_a_difference_once(rows, tmp_path, monkeypatch):
    compared = []
    original = data.compare_traces

    def counted(*traces, **told):
        compared.append(traces)
        return original(*traces, **told)

    monkeypatch.setattr(data, "compare_traces", counted)
    found = rows(standard=make_trace(GPU, 0.0, idle=3.0), flat=make_trace(GPU * 2, 0.0, idle=4.0))
    write_reports(report_of(found), tmp_path)
    assert len(compared) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"summary.txt", "report.html", "trace_differences.png", "trace_operators.csv"}

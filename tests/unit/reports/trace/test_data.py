"""Why a method is slower than standard: the parts are named, and they add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.reports.outputs import write_reports
from dpscope.reports.tables import Row
from dpscope.reports.trace import data
from dpscope.reports.trace.data import differences, traced_step, traced_steps
from dpscope.results.schema import Result
from tests.unit.reports.trace_results import FLAT, GPU, STANDARD, make_trace, operator
from tests.unit.reports.writing import report_of


def test_the_difference_is_sorted_and_says_what_is_new_what_grew_and_what_is_gone(rows):
    (found,) = differences(traced_steps(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT, 2.5))))
    assert [(change.operator, change.phase, change.kind, change.ms) for change in found.changes[:-1]] == [
        ("aten::bmm", "backward", "new", 9.0),
        ("aten::add", "noise", "new in noise", 3.0),
        ("aten::mm", "backward", "shrank", -1.0),
        ("aten::add", "forward", "gone from forward", -2.0),
    ]
    assert found.changes[-1].operator.startswith("outside operators")
    assert found.changes[-1].ms == pytest.approx(1.5)
    assert found.total_ms == pytest.approx(18.5 - 8.0)


operators = st.lists(
    st.builds(
        operator,
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["forward", "clip"]),
        st.floats(0.001, 1e4),
        gpu=st.just(True),
    ),
    unique_by=lambda row: (row["operator"], row["phase"]),
    max_size=8,
)


@given(operators, operators, st.floats(0, 100), st.floats(0, 100))
def test_on_a_gpu_the_changes_sum_to_the_difference_of_the_traced_steps(before, after, idle, overlap):
    def row(method, trace, reference=None):
        spec = {"workload": {"name": "w"}, "instrument": "trace"}
        result = Result(experiment=method, config={}, spec=spec, trace=trace)
        return Row({"trace": result}, reference=reference)

    standard = row("standard", make_trace(before, 0.0, idle=idle))
    found = traced_step(row("ghost", make_trace(after, overlap, idle=1.0), standard)).difference
    assert found.basis == "gpu"
    assert sum(change.ms for change in found.changes) == pytest.approx(found.total_ms, abs=1e-6)


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
    original = data._compare
    monkeypatch.setattr(data, "_compare", lambda *steps: compared.append(steps) or original(*steps))
    found = rows(standard=make_trace(GPU, 0.0, idle=3.0), flat=make_trace(GPU * 2, 0.0, idle=4.0))
    write_reports(report_of(found), tmp_path)
    assert len(compared) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"summary.txt", "report.html", "trace_differences.png", "trace_operators.csv"}

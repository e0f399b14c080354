"""Why a method is slower than standard: the parts are named, and they add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.reports.trace.data import compare_traces
from tests.unit.reports.trace_results import FLAT, STANDARD, make_trace, operator


def test_the_difference_is_sorted_and_says_what_is_new_what_grew_and_what_is_gone():
    found = compare_traces("flat", make_trace(FLAT, 2.5), make_trace(STANDARD), doubt="")
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
    standard, ghost = make_trace(before, 0.0, idle=idle), make_trace(after, overlap, idle=1.0)
    found = compare_traces("ghost", ghost, standard, doubt="")
    assert found.basis == "gpu"
    assert sum(change.ms for change in found.changes) == pytest.approx(found.total_ms, abs=1e-6)

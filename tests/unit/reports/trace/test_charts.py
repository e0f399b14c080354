"""Charts of traces: segments make up the step, bars make up the difference."""

from __future__ import annotations

import pytest

from dpscope.reports.report import compare_results
from dpscope.reports.trace.figures import DRAWN_CHANGES, operators, phases
from tests.unit.reports.trace_results import make_trace, operator

STANDARD = [operator("aten::mm", "backward", 5.0), operator("aten::add", "forward", 2.0)]
FLAT = [operator("aten::mm", "backward", 4.0), operator("aten::bmm", "clip", 9.0)]
MANY = [operator(f"aten::op{number}", "clip", 1.0 + number) for number in range(DRAWN_CHANGES + 5)]


def gpu(operators_, **options):
    return make_trace([{**row, "gpu_ms": row["self_cpu_ms"]} for row in operators_], 0.0, idle=1.0, **options)


def test_a_bar_is_made_of_phases_in_the_order_of_a_step(rows):
    (view,) = phases(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT))).views
    assert view.data["methods"] == ["standard", "flat"]
    assert {part["phase"]: part["ms"] for part in view.data["parts"]} == {
        "backward": [5.0, 4.0],
        "forward": [2.0, None],
        "clip": [None, 9.0],
    }
    assert "traced step" in view.data["axis"]


def test_on_a_gpu_phases_and_idle_make_up_the_unprofiled_step(rows):
    (view,) = phases(rows(median=20.0, standard=gpu(STANDARD), flat=gpu(FLAT))).views
    for place in range(2):
        assert sum(part["ms"][place] or 0.0 for part in view.data["parts"]) == pytest.approx(20.0)
    assert view.data["parts"][-1]["phase"] == "GPU idle"
    assert "GPU" in view.data["axis"]


def test_the_sentence_says_how_much_more_and_in_which_phase(rows):
    (view,) = phases(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT))).views
    assert "flat 6.0 ms more than standard; what grows most is clip (+9.0 ms)" in view.says


def test_bars_sum_to_how_much_longer_the_traced_step_is(rows):
    standard = make_trace(STANDARD)
    flat = make_trace([*FLAT, *MANY])
    (view,) = operators(rows(standard=standard, flat=flat)).views
    (panel,) = view.data["panels"]
    assert len(panel["bars"]) == DRAWN_CHANGES + 1
    assert panel["bars"][-1]["label"].startswith("everything else")
    assert panel["bars"][0]["ms"] == max(row["self_cpu_ms"] for row in MANY)  # what matters least is what is summed up
    assert sum(bar["ms"] for bar in panel["bars"]) == pytest.approx(flat["step_ms"] - standard["step_ms"])
    assert sum(line[-1] for line in view.table.rows) == pytest.approx(panel["total_ms"])


def test_new_and_gone_operators_are_marked_with_their_phase(rows):
    (view,) = operators(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT))).views
    (panel,) = view.data["panels"]
    kinds = {(bar["name"], bar["phase"]): bar["kind"] for bar in panel["bars"]}
    assert kinds["aten::bmm", "clip"] == "new"
    assert kinds["aten::add", "forward"] == "gone"
    assert [bar["ms"] for bar in panel["bars"]] == sorted((bar["ms"] for bar in panel["bars"]), reverse=True)
    assert "aten::bmm in clip (+9.0 ms)" in view.says


def test_without_a_traced_standard_nothing_grew(rows):
    found = rows(flat=make_trace(FLAT))
    assert operators(found) is None
    assert phases(found) is not None


def test_without_traces_there_is_no_chart(make_result):
    found = compare_results([make_result()])
    assert phases(found) is None
    assert operators(found) is None

"""Launches added up by kernel and phase: nothing is lost on the way to a short table."""

from __future__ import annotations

import pytest

from dpscope.instruments.ncu.metrics import DRAM_READ, DRAM_WRITE, GPU_TIME, TENSOR_OPS
from dpscope.instruments.ncu.reading import (
    CACHED,
    Action,
    add_up_metrics,
    describe_kernels,
    keep_top,
    kernel_rows,
    read_report,
)

GEMM, ADD = "nvjet_sm90_tst_64x64", "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"


def launch(name, phase, read, write):
    return Action(name, {DRAM_READ: read, DRAM_WRITE: write, GPU_TIME: 10.0, TENSOR_OPS[0]: 2.0}, phase)


@pytest.fixture(scope="module")
def step(ncu_captures):
    return read_report(ncu_captures["kernels"])


def test_launches_of_a_kernel_in_a_phase_are_one_row_largest_first():
    actions = [
        launch(ADD, "forward", 5.0, 5.0),
        launch(GEMM, "forward", 40.0, 1.0),
        launch(GEMM, "backward", 90.0, 1.0),
    ]
    rows = kernel_rows([*actions, launch(GEMM, "forward", 40.0, 1.0)])
    assert [(row["name"], row["phase"], row["calls"]) for row in rows] == [
        (GEMM, "backward", 1),
        (GEMM, "forward", 2),
        ("vectorized_elementwise_kernel<CUDAFunctor_add>", "forward", 1),
    ]
    assert rows[1] == {
        **{"name": GEMM, "family": "gemm", "phase": "forward", "calls": 2, "dram_read_bytes": 80},
        **{"dram_write_bytes": 2, "flops": 4, "time_ns": 20},
    }


def test_a_figure_that_was_not_counted_is_not_there():
    (row,) = kernel_rows([launch(GEMM, None, 1.0, 1.0)])
    assert "l2_to_sm_bytes" not in row


@pytest.mark.parametrize("top", [1, 5, 1000])
@pytest.mark.parametrize(
    "figure", ["calls", "dram_read_bytes", "dram_write_bytes", "l2_to_sm_bytes", "flops", "time_ns"]
)
def test_however_few_rows_are_shown_their_sum_is_the_whole(step, top, figure):
    rows = kernel_rows(step)
    shown = keep_top(rows, top)
    assert shown[: min(top, len(rows))] == rows[:top]
    assert sum(row[figure] for row in shown) == sum(row[figure] for row in rows)
    by_family = {}
    for row in shown:
        by_family[row["family"]] = by_family.get(row["family"], 0) + row[figure]
    for row in rows:
        by_family[row["family"]] -= row[figure]
    assert not any(by_family.values())


def test_the_sums_of_a_real_step_are_those_of_its_launches(step):
    seen = describe_kernels(step, top=10)
    assert seen["calls_seen"] == 298
    assert sum(row["dram_read_bytes"] for row in seen["rows"]) == 1_623_529_728
    assert "phases are unknown" in seen["note"]
    assert CACHED in seen["note"]


def test_a_filter_is_named():
    assert "matching 'gemm'" in describe_kernels([launch(GEMM, "forward", 1.0, 1.0)], top=3, kernel="gemm")["note"]


def test_only_counts_are_added_up():
    actions = [Action("a", {"x__y.sum": 1.0, "x__y.pct": 50.0}), Action("b", {"x__y.sum": 2.0, "x__y.pct": 50.0})]
    assert add_up_metrics(actions) == {"x__y.sum": 3.0}

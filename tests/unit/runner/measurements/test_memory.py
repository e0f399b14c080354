"""A memory measurement in this process: the result's parts, and what it says of a step."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dpscope.errors import UserError
from dpscope.instruments.peaks import live_tensor_bytes
from dpscope.results.schema import merge_results
from dpscope.runner.measure import measure, measure_or_explain
from dpscope.runner.measurements import memory as measurement
from dpscope.runner.measurements.memory import load_rule
from dpscope.vocabulary.components import KEYS

STAGES = ["0_model_loaded", "1_wrapped_with_dp", "2_optimizer_created", "3_after_warmup"]
ITERATION = ["iter0_before_forward", "iter0_after_forward", "iter0_after_backward", "iter0_after_step"]


@pytest.fixture(scope="module")
def results(make_spec):
    return {
        method: measure(make_spec(instrument="memory", method=method, warmup=1)) for method in ("standard", "ghost")
    }


def test_the_breakdown_has_every_component_and_the_totals_of_old(results):
    for result in results.values():
        assert list(result.breakdown) == [*(f"{key}_mb" for key in KEYS), "total_allocated_mb", "peak_allocated_mb"]
        assert result.breakdown["total_allocated_mb"] == result.peak_memory_mb == result.memory["peak_bytes"] / 2**20


def test_snapshots_go_through_the_stages_of_old(results):
    assert [s["name"] for s in results["ghost"].snapshots] == [*STAGES, *ITERATION]
    wrapped = STAGES[1]
    assert [s["name"] for s in results["standard"].snapshots] == [*(s for s in STAGES if s != wrapped), *ITERATION]
    for result in results.values():
        at = {s["name"]: s["allocated_mb"] * 2**20 for s in result.snapshots}
        times = [s["timestamp"] for s in result.snapshots]
        assert times == sorted(times)
        assert at["iter0_after_forward"] > at["iter0_before_forward"]
        assert max(at[name] for name in ITERATION) <= result.memory["peak_bytes"]


def test_the_peak_says_when_and_where(results):
    for result in results.values():
        peak = result.memory["peak"]
        assert peak["phase"] in {p["name"] for p in result.timeline["phases"]} | {"step"}
        assert peak["operator"].startswith("aten::")
        assert set(peak["components"]) == set(KEYS)


def test_on_the_cpu_the_tracked_peak_is_the_figure_and_the_allocators_stands_beside_it(results):
    for result in results.values():
        memory = result.memory
        assert memory["source"] == "tracker"
        assert memory["peak_bytes"] == memory["tracked_peak_bytes"]
        assert memory["unattributed"] == []
        assert memory["tracked_peak_bytes"] <= memory["allocator_peak_bytes"] <= 1.02 * memory["tracked_peak_bytes"]
        assert memory["peak_rss_bytes"] > memory["peak_bytes"]


def test_no_time_is_taken_under_the_tracker(results):
    for result in results.values():
        assert result.timing == {}
        assert result.avg_time_ms is None


def test_on_cuda_what_the_tracker_did_not_see_is_explained_in_full(results):
    """The arithmetic of a GPU's row, with the figures of one: requested, rounded, cuBLAS."""
    use = _use(2**30)
    allocator = {
        "peak_allocated_bytes": 2**30 + 70_000_000,
        "peak_requested_bytes": 2**30 + 69_000_000,
        "cublas_workspace_bytes": 68_157_440,
    }
    memory = measurement._memory(use, allocator, compiled=False)
    assert memory["peak_bytes"] == 2**30 + 70_000_000
    assert memory["peak"]["components"]["unattributed"] == 70_000_000
    assert {item["what"]: item["bytes"] for item in memory["unattributed"]} == {
        "cuBLAS workspaces": 68_157_440,
        "rounding of blocks to 512 bytes": 1_000_000,
        "inside operators and libraries": 69_000_000 - 68_157_440,
    }


def _use(nbytes):
    from torch import nn

    from dpscope.instruments.memory import attribute, track

    step = lambda: torch.empty(nbytes, dtype=torch.uint8, device="meta")  # noqa: E731
    return attribute(track(step, device="meta", model=nn.Identity(), holdings=lambda: ()))


def test_times_and_memory_of_two_processes_make_one_result(make_spec, make_result, results):
    time = make_result(method="ghost", median=12.5)
    both = merge_results(time, results["ghost"])
    assert both.timing == time.timing
    assert both.avg_time_ms == 12.5
    assert both.peak_memory_mb == results["ghost"].peak_memory_mb
    assert both.breakdown
    assert both.snapshots
    failed = make_result(status="oom", method="ghost")
    assert merge_results(failed, results["ghost"]) is failed
    assert merge_results(time, failed) is failed


def test_a_rule_comes_from_a_file_or_a_module(tmp_path, make_spec):
    (tmp_path / "mine.py").write_text(
        "def scores(birth):\n    return 'scores' if 'softmax' in birth.operator else None\n"
    )
    where = f"{tmp_path / 'mine.py'}:scores"
    result = measure(make_spec(instrument="memory", options={"rule": where}))
    assert "scores_mb" in result.breakdown
    assert "scores" in result.timeline["components"]
    assert load_rule("dpscope.units:list_names").__name__ == "list_names"


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no_such_package:f", "there is no module 'no_such_package'"),
        ("json:no_such_name", "json has no 'no_such_name'"),
        ("json:__name__", "is not a function"),
        ("just_a_name", "expected FILE.py:function or package.module:function"),
    ],
)
def test_a_rule_that_is_not_there_is_a_sentence(where, sentence, make_spec):
    with pytest.raises(UserError, match=sentence):
        load_rule(where)
    result = measure_or_explain(make_spec(instrument="memory", options={"rule": where}))
    assert result.status == "skipped"
    assert sentence in result.reason


def test_a_tensor_that_vmap_left_behind_has_no_bytes_of_its_own():
    left = []
    torch.func.vmap(lambda x: left.append(x) or x)(torch.ones(3, 2))
    assert live_tensor_bytes() >= 0


class WithoutDevice(torch.Tensor):
    """As torch 2.6 leaves some behind."""

    @property
    def device(self):
        raise RuntimeError("tensor does not have a device")


def test_a_tensor_without_a_device_has_no_bytes_here():
    before = live_tensor_bytes()
    left = WithoutDevice(1000)
    assert live_tensor_bytes() == before
    del left


def test_a_tensor_that_wraps_others_is_counted_by_what_it_wraps():
    """A sharded parameter (DTensor) has no storage of its own; torch's TwoTensor is such a wrapper."""
    before = live_tensor_bytes()
    wrapper = TwoTensor(torch.zeros(1000), torch.ones(1000))
    assert live_tensor_bytes() - before == wrapper.a.nbytes + wrapper.b.nbytes

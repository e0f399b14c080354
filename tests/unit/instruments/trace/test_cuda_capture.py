"""A real trace of two steps on a GPU (benchmarks/record_trace_capture.py), against torch's own totals of it."""

from __future__ import annotations

import json

import pytest

from dpscope.instruments.trace.analysis import operator_table
from dpscope.instruments.trace.events import read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.results.payloads.trace import TracePayload
from dpscope.results.schema import find_mismatch
from tests import DATA

CAPTURE, EXPECTED = DATA / "cuda_step_trace.json.gz", DATA / "cuda_step_trace.expected.json"

pytestmark = pytest.mark.skipif(not CAPTURE.exists(), reason="no capture in tests/data")


@pytest.fixture(scope="module")
def expected():
    return json.loads(EXPECTED.read_text())


@pytest.fixture(scope="module")
def trace():
    return read_trace(CAPTURE)


@pytest.fixture(scope="module")
def summary(trace):
    return summarise([trace])


def test_a_step_is_its_phases_and_also_gpu_work_and_idle_time(summary, expected):
    gpu = summary["gpu"]
    assert summary["steps"] == expected["steps"]
    assert sum(part["cpu_ms"] for part in summary["phases"]) == pytest.approx(summary["step_ms"], rel=1e-6)
    operators = sum(row["gpu_ms"] for row in summary["operators"])
    assert operators - gpu["overlap_ms"] + gpu["idle_ms"] == pytest.approx(summary["step_ms"], rel=1e-6)
    assert gpu["busy_ms"] + gpu["idle_ms"] == pytest.approx(summary["step_ms"], rel=1e-6)


def test_gpu_time_of_operators_is_torchs_own(trace, expected):
    ours = operator_table(trace).set_index("operator").self_device_ms
    theirs = {
        name: row["self_device_us"] / 1e3
        for name, row in expected["totals"].items()
        if name.startswith("aten::") and row["self_device_us"]
    }
    assert theirs
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=0.01, abs=2e-3)


def test_the_batch_goes_to_the_gpu_once_a_step(summary):
    (to_device,) = [row for row in summary["copies"] if row["kind"] == "HtoD"]
    assert (to_device["count"], to_device["bytes"]) == (1, 4 * 64 * 128)


def test_the_planted_item_is_the_wait_of_the_clip_phase(summary):
    waits = [wait for wait in summary["synchronisations"] if wait["phase"] == "clip"]
    assert {wait["operator"] for wait in waits} == {"aten::item"}
    assert all("record_trace_capture.py" in wait["where"] for wait in waits)


def test_backward_kernels_belong_to_backward_though_another_thread_launched_them(summary, trace):
    times = {part["phase"]: part["gpu_ms"] for part in summary["phases"]}
    assert times["backward"] > 0
    threads = {trace.launch_of(work).thread for work in trace.device_work if trace.launch_of(work) is not None}
    assert len(threads) == 2


def test_casts_of_autocast_are_found_with_their_formats(summary):
    assert "float to bfloat16" in {row["formats"] for row in summary["casts"]}


def test_modules_have_gpu_time_forward_and_backward(summary):
    modules = {row["module"]: row["phases"] for row in summary["modules"]}
    assert {"forward", "backward"} <= set(modules["0"])


def test_the_capture_tells_nothing_of_the_machine_it_was_made_on(trace):
    names = [event.name for event in trace.frames]
    assert names
    assert not [name for name in names if name.startswith("/") or any(f"/{home}/" in name for home in ("home", "root"))]


def test_the_summary_is_of_the_shape_that_result_files_have(summary):
    assert find_mismatch(json.loads(json.dumps(summary)), TracePayload) is None

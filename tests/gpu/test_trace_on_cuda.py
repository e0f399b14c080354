"""The trace instrument on a real GPU: everything adds up, and waits are found where they are."""

from __future__ import annotations

import pytest
import torch

from dpscope.instruments.trace.capture import Detail, record
from dpscope.instruments.trace.events import read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.runner.measure import measure
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.instruments import Schedule
from dpscope.vocabulary.phases import CLIP, FORWARD, phase
from dpscope.workloads.configs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", params=["standard", "flat", "ghost", "flash"])
def trace(request, tmp_path_factory):
    spec = RunSpec(
        workload=make_config("tiny"),
        method=request.param,
        batch_size=4,
        seq_len=64,
        dtype="bf16",
        device="cuda",
        instrument="trace",
        options={"modules": True},
    )
    return measure(spec, files=tmp_path_factory.mktemp(request.param) / "files").trace


def test_a_step_is_its_phases_and_what_lies_between_them(trace):
    assert sum(part["cpu_ms"] for part in trace["phases"]) == pytest.approx(trace["step_ms"], rel=0.02)


def test_a_step_is_gpu_work_and_gpu_idle_time(trace):
    gpu = trace["gpu"]
    assert gpu["busy_ms"] + gpu["idle_ms"] == pytest.approx(trace["step_ms"], rel=0.02)
    assert gpu["busy_ms"] > 0
    operators = sum(row["gpu_ms"] for row in trace["operators"])
    assert operators - gpu["overlap_ms"] == pytest.approx(gpu["busy_ms"], rel=0.02)
    assert sum(part["gpu_ms"] for part in trace["phases"]) == pytest.approx(operators)
    assert sum(part["ms"] for part in trace["families"]) == pytest.approx(operators)


def test_backward_kernels_belong_to_the_backward_pass_whatever_thread_launched_them(trace):
    times = {part["phase"]: part["gpu_ms"] for part in trace["phases"]}
    assert times["backward"] > times["forward"] > 0
    assert times.get("between phases", 0.0) < 0.5 * sum(times.values())


def test_modules_have_gpu_time_forward_and_backward(trace):
    head = next(module for module in trace["modules"] if module["module"] == "head")
    assert head["phases"]["forward"] > 0
    assert head["phases"].get("backward", 0.0) > 0


def test_a_planted_item_is_a_wait_with_its_operator_phase_and_line(tmp_path):
    x = torch.randn(512, 512, device="cuda")

    def step():
        with phase(FORWARD):
            y = x @ x
        with phase(CLIP):
            y.sum().item()

    recording = record(step, tmp_path, device="cuda", schedule=Schedule(skip_first=2), detail=Detail(stacks=True))
    waits = summarise([read_trace(path) for path in recording.paths])["synchronisations"]
    assert {wait["phase"] for wait in waits} == {"clip"}
    assert all(wait["operator"] == "aten::item" for wait in waits)
    assert any("test_trace_on_cuda.py" in wait["where"] for wait in waits)
    copies = summarise([read_trace(path) for path in recording.paths])["copies"]
    assert [(copy["kind"], copy["count"], copy["bytes"]) for copy in copies] == [("DtoH", 1, 4)]


def test_gpu_time_by_operator_is_what_torch_itself_says(tmp_path):
    from torch.profiler import ProfilerActivity, profile

    from dpscope.instruments.trace.capture import export_trace

    x = torch.randn(256, 256, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            (x @ x).relu().sum()
        torch.cuda.synchronize()
    summary = summarise([read_trace(export_trace(profiler, tmp_path / "trace.json.gz"))])
    ours = {row["operator"]: 1e3 * row["gpu_ms"] for row in summary["operators"] if row["gpu_ms"]}
    theirs = {row.key: row.self_device_time_total for row in profiler.key_averages() if row.key.startswith("aten::")}
    assert ours == pytest.approx({name: value for name, value in theirs.items() if value}, rel=0.02)

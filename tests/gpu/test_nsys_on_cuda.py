"""The real nsys on a real GPU: phases are on the timeline, time adds up, and no secret of ours is in the report.

Where nsys lives inside Nsight Compute its importer may lack libraries: set LD_LIBRARY_PATH to a folder that has them.
"""

from __future__ import annotations

import pytest
import torch

from dpscope.instruments.nsys.command import find_nsys
from dpscope.runner.measure import measure
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_nsys() is None, reason="needs nsys"),
]

SECRET = "s3cr3t-of-the-person-who-measures"


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A capture of ghost clipping, taken with a token in the environment; and the folder with all it left."""
    folder = tmp_path_factory.mktemp("nsys") / "row"
    spec = RunSpec(
        workload=make_config("tiny"),
        method="ghost",
        batch_size=4,
        seq_len=64,
        dtype="bf16",
        warmup=1,
        device="cuda",
        instrument="nsys",
        options={"captured_steps": 2},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        patch.setenv("DPSCOPE_UNKNOWN_VARIABLE", SECRET)
        result = measure(spec, files=folder)
    if not result.ok and "importer" in (result.reason or ""):
        pytest.skip(str(result.reason))
    assert result.ok, f"{result.reason}\n{result.details}"
    return result, folder


def test_every_phase_of_ghost_clipping_has_gpu_time(captured):
    result, _ = captured
    phases = {phase["phase"]: phase for phase in result.nsys["phases"]}
    for name in ("forward", "backward", "clip", "noise", "optimizer"):
        assert phases[name]["gpu_ms"] > 0
        assert phases[name]["kernels"] > 0
    # Two backward passes, launched by autograd's thread.
    assert phases["backward"]["kernels"] > phases["forward"]["kernels"]


def test_phases_sum_to_all_gpu_time_and_steps_are_counted(captured):
    result, _ = captured
    figures = result.nsys
    assert figures["steps"] == 2
    assert sum(phase["gpu_ms"] for phase in figures["phases"]) == pytest.approx(figures["gpu"]["total_ms"])
    assert figures["gpu"]["busy_ms"] + figures["gpu"]["idle_ms"] == pytest.approx(figures["gpu"]["span_ms"])


def test_only_the_steps_were_recorded(captured):
    """The kernels of warm-up, model and data would be many times those of two steps."""
    result, _ = captured
    inside = sum(phase["kernels"] for phase in result.nsys["phases"] if phase["phase"] != "between phases")
    assert inside > 0.9 * result.nsys["kernel_total"]["calls"]


def test_no_secret_is_in_anything_that_was_left(captured):
    result, folder = captured
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in result.to_json()

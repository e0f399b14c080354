"""The memory instrument on a GPU: its peak against the allocator's own, its components to the byte."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from dpscope.instruments.memory import Tracker, attribute
from dpscope.instruments.timing import no_progress
from dpscope.results.derived import conservation_faults
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore
from dpscope.runner.measure import measure
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.runner.sweep import Limits, launch
from dpscope.vocabulary.components import COMPONENTS, GRADIENTS, PER_SAMPLE_GRADIENTS
from dpscope.workloads.configs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"vocab_size": 8192, "hidden_dim": 512, "num_layers": 4, "num_heads": 8, "max_seq_len": 1024}
METHODS = ("standard", "flat", "ghost", "flash")
# What operators take inside themselves, as a share of the peak: in float32 attention's backward pass is the
# memory-efficient kernel, which has scratch of its own; no dispatch mode sees it.
INSIDE_OPERATORS = {"bf16": 1e-3, "fp32": 0.03}


def spec_of(method: str, dtype: str = "bf16", **changes: object) -> RunSpec:
    values: dict[str, object] = {"batch_size": 8, "seq_len": 512, "warmup": 2, "steps": 2, "device": "cuda"}
    workload = make_config("tiny", **SIZES)
    return RunSpec(workload=workload, method=method, dtype=dtype, instrument="memory", **{**values, **changes})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """What a child process measures: what other tests have left on the GPU is not in its peak."""
    store = ResultStore(tmp_path_factory.mktemp("memory"))
    store.create()

    @cache
    def measure_in_child(method: str, dtype: str = "bf16") -> Result:
        return launch(spec_of(method, dtype), store, limits=Limits(timeout=120), on_progress=no_progress)

    return measure_in_child


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_the_tracked_peak_is_what_was_requested_less_library_workspaces(
    measured: Callable[..., Result], method: str, dtype: str
) -> None:
    memory = measured(method, dtype).memory
    requested = memory["peak_requested_bytes"] - memory["cublas_workspace_bytes"]
    print(f"{method} {dtype}: tracked {memory['tracked_peak_bytes']:,}, requested less cuBLAS {requested:,}")
    assert 0 <= requested - memory["tracked_peak_bytes"] <= INSIDE_OPERATORS[dtype] * requested


@pytest.mark.parametrize("method", METHODS)
def test_every_byte_is_counted_once(measured: Callable[..., Result], method: str) -> None:
    result = measured(method)
    assert conservation_faults(result) == []
    assert result.memory["peak_bytes"] == result.memory["peak_allocated_bytes"]


def test_operators_of_the_backward_threads_are_seen() -> None:
    trainer, batch = make_trainer(spec_of("standard"))
    tracker = Tracker("cuda", trainer.plain_model, trainer.holdings)
    with tracker.tracking() as record:
        trainer.train_step(batch)
    backward = [life for life in record.lives if life.birth.phase == "backward"]
    gradients = [life for life in backward if life.owner == GRADIENTS]
    assert len(gradients) >= 0.9 * len(list(trainer.plain_model.parameters()))
    assert {life.birth.module for life in backward} > {"blocks.0.up", "blocks.3.down", "head"}
    assert attribute(record).peak_birth is not None


def test_per_sample_gradients_of_flat_are_one_gradient_a_sample(measured: Callable[..., Result]) -> None:
    trainer, _ = make_trainer(spec_of("flat", "fp32"))
    parameters = sum(p.numel() for p in trainer.plain_model.parameters())
    del trainer
    timeline = measured("flat", "fp32").timeline
    place = timeline["components"].index(PER_SAMPLE_GRADIENTS) + 1
    assert max(point[place] for point in timeline["points"]) == 8 * parameters * 4


def test_standard_has_nothing_in_private_components(measured: Callable[..., Result]) -> None:
    timeline = measured("standard").timeline
    private = [timeline["components"].index(part.key) + 1 for part in COMPONENTS if part.private_only]
    assert all(point[place] == 0 for point in timeline["points"] for place in private)


def test_the_tracker_takes_no_device_memory_and_leaves_none_behind() -> None:
    trainer, batch = make_trainer(spec_of("ghost"))
    for _ in range(2):
        trainer.train_step(batch)

    def peaks() -> tuple[int, int]:
        gc.collect()  # what earlier tests left in cycles must not go away half-way
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()

    before = peaks()
    with Tracker("cuda", trainer.plain_model, trainer.holdings).tracking():
        during = peaks()
    after = peaks()
    assert before == after
    assert during[1] == before[1]
    assert during[0] == pytest.approx(before[0], rel=1e-3)


def test_snapshots_follow_the_allocator_through_the_stages(measured: Callable[..., Result]) -> None:
    taken = {snapshot["name"]: snapshot for snapshot in measured("ghost").snapshots}
    assert list(taken)[:4] == ["0_model_loaded", "1_wrapped_with_dp", "2_optimizer_created", "3_after_warmup"]
    assert taken["iter0_after_forward"]["allocated_mb"] > taken["iter0_before_forward"]["allocated_mb"]
    assert all(snapshot["reserved_mb"] >= snapshot["allocated_mb"] for snapshot in taken.values())


def test_memory_viz_writes_a_file_that_holds_the_allocations_of_a_step(tmp_path: Path) -> None:
    result = measure(spec_of("standard", options={"memory_viz": True}), files=tmp_path / "files" / "row")
    (name,) = result.files.values()
    snapshot = pickle.loads((tmp_path / name).read_bytes())
    assert any(trace for trace in snapshot["device_traces"])

"""A row of several processes: the slowest rank's time, the largest peak, and whoever failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpscope.instruments.processes import FinishedCommand
from dpscope.instruments.timing import no_progress
from dpscope.runner.measure import measure
from dpscope.runner.measurements import world
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS

TINY = PRESETS["tiny"]


def spec(**more: Any) -> RunSpec:
    values = {"method": "flash", "batch_size": 2, "seq_len": 8, "warmup": 1, "steps": 2, "gpus": 2, **more}
    return RunSpec(workload=TINY, **values)


def figures(times: list[float], peak: int) -> dict[str, Any]:
    memory = {"source": "made up", "peak_bytes": peak}
    return {"step_ms": times, "memory": memory, "collectives": {"all-reduce": 10**9}, "notes": []}


def left_by_ranks(monkeypatch: pytest.MonkeyPatch, *outcomes: dict[str, Any] | None) -> None:
    def run(command: list[str], **options: Any) -> FinishedCommand:
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                (Path(command[-1]) / f"{rank}.json").write_text(json.dumps(outcome))
        return FinishedCommand(0, "")

    monkeypatch.setattr(world, "run_limited", run)


def ok(times: list[float], peak: int) -> dict[str, Any]:
    return {"status": "ok", "reason": None, "figures": figures(times, peak)}


def test_a_step_takes_as_long_as_its_slowest_rank_and_needs_what_the_largest_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_by_ranks(monkeypatch, ok([10.0, 40.0], 3 << 20), ok([20.0, 30.0], 5 << 20))
    result = world.measure_world(spec(), no_progress)
    assert result.ok
    assert result.timing["step_ms"] == [20.0, 40.0]
    assert result.peak_memory_mb == 5
    (note,) = result.notes
    assert note["peak_bytes_by_rank"] == [3 << 20, 5 << 20]
    assert note["bytes_by_collective"] == {"all-reduce": 10**9}
    assert "20 ms at 50 GB/s, 67% of the step" in note["sentence"]


def test_a_rank_that_failed_speaks_for_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"status": "failed", "reason": "another process has ended", "figures": None}
    left_by_ranks(monkeypatch, lost, {"status": "oom", "reason": "out of GPU memory", "figures": None})
    result = world.measure_world(spec(), no_progress)
    assert (result.status, result.reason) == ("oom", "rank 1: out of GPU memory")


def test_a_rank_that_left_nothing_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_ranks(monkeypatch, ok([1.0, 1.0], 1), None)
    result = world.measure_world(spec(), no_progress)
    assert result.status == "failed"
    assert "rank 1 ended without a result" in str(result.reason)


@pytest.mark.slow
def test_two_real_processes_are_started_by_torch_and_measured() -> None:
    result = measure(spec(parallel="fsdp"))
    assert result.ok, result.reason
    (note,) = [note for note in result.notes if note["topic"] == "ranks"]
    assert len(note["time_ms_by_rank"]) == 2
    assert set(note["bytes_by_collective"]) == {"all-gather", "reduce-scatter"}

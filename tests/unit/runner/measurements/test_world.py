"""A row of several processes: the slowest rank's time, the largest peak, and whoever failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpscope.instruments.processes import FinishedCommand
from dpscope.results.schema import parse_result
from dpscope.runner.measure import measure, measure_or_explain
from dpscope.runner.measurements import world
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS

TINY = PRESETS["tiny"]


def spec(**more: Any) -> RunSpec:
    values = {"method": "flash", "batch_size": 2, "seq_len": 8, "warmup": 1, "steps": 2, "gpus": 2, **more}
    return RunSpec(workload=TINY, **values)


def figures(times: list[float], peak: int) -> dict[str, Any]:
    memory = {"source": "made up", "peak_bytes": peak}
    moved = {"all-reduce": {"calls": 3, "bytes": 10**9, "sent_bytes": 10**9}}
    share = times[0] / 100
    return {"step_ms": times, "memory": memory, "collectives": moved, "collective_share": share, "notes": []}


def left_by_ranks(monkeypatch: pytest.MonkeyPatch, *outcomes: dict[str, Any] | None, output: str = "") -> None:
    def run(command: list[str], **options: Any) -> FinishedCommand:
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                (Path(command[-1]) / f"{rank}.json").write_text(json.dumps(outcome))
        return FinishedCommand(0, output)

    monkeypatch.setattr(world, "run_limited", run)


def ok(times: list[float], peak: int) -> dict[str, Any]:
    return {"status": "ok", "reason": None, "figures": figures(times, peak)}


def test_a_step_takes_as_long_as_its_slowest_rank_and_needs_what_the_largest_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_by_ranks(monkeypatch, ok([10.0, 40.0], 3 << 20), ok([20.0, 30.0], 5 << 20))
    result = measure_or_explain(spec())
    assert result.ok
    assert result.timing["step_ms"] == [20.0, 40.0]
    assert result.peak_memory_mb == 5
    assert result.ranks == {
        "simulated": False,
        "time_ms": [25.0, 25.0],
        "peak_bytes": [3 << 20, 5 << 20],
        "collectives": {"all-reduce": {"calls": 3, "bytes": 10**9, "sent_bytes": 10**9}},
        "collective_share": [0.1, 0.2],
    }
    assert parse_result(result.to_json()) == result


def test_a_rank_that_failed_speaks_for_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"status": "failed", "reason": "another process has ended", "figures": None}
    left_by_ranks(monkeypatch, lost, {"status": "oom", "reason": "out of GPU memory", "figures": None})
    result = measure_or_explain(spec())
    assert (result.status, result.reason) == ("oom", "rank 1: out of GPU memory")


def test_a_rank_that_left_nothing_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_ranks(monkeypatch, ok([1.0, 1.0], 1), None)
    result = measure_or_explain(spec())
    assert result.status == "failed"
    assert "rank 1 ended without a result" in str(result.reason)


# As torch.distributed.run printed it when rank 1 was killed.
KILLED = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 25752)  (SIGTERM)
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 25753)
"""


@pytest.mark.parametrize("other", [None, {"status": "failed", "reason": "Connection reset by peer", "figures": None}])
def test_a_rank_that_was_killed_is_named_before_those_that_lost_it(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any] | None
) -> None:
    left_by_ranks(monkeypatch, other, None, output=KILLED)
    result = measure_or_explain(spec())
    assert result.status == "failed"
    assert str(result.reason).startswith("rank 1: the process was ended by SIGKILL")


@pytest.mark.parametrize("gbps", [400.0, 100.0])
def test_what_a_simulated_rank_sends_is_computed_from_the_stated_link(
    monkeypatch: pytest.MonkeyPatch, gbps: float
) -> None:
    monkeypatch.setattr(world, "measure_rank", lambda spec, progress: figures([10.0, 10.0], 1))
    result = measure_or_explain(spec(gpus=1, simulate_world=8, link_gbps=gbps))
    assert result.ranks["simulated"]
    assert result.ranks["link"] == {"gbps": gbps, "send_ms": pytest.approx(8e3 / gbps)}  # 10^9 bytes
    assert "collective_share" not in result.ranks
    assert result.notes[0]["sentence"].startswith("Simulated: one rank of 8")


@pytest.mark.slow
def test_two_real_processes_are_started_by_torch_and_measured() -> None:
    result = measure(spec(parallel="fsdp"))
    assert result.ok, result.reason
    assert len(result.ranks["time_ms"]) == 2
    assert set(result.ranks["collectives"]) == {"all-gather", "reduce-scatter"}
    assert all(0 < share < 1 for share in result.ranks["collective_share"])

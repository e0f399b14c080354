"""A row of several processes: the slowest rank's time, the largest peak, and whoever failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dpscope.instruments.timing import no_progress
from dpscope.results.schema import parse_result
from dpscope.runner.measure import measure, measure_or_explain
from dpscope.runner.measurements import time
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import Compilation
from tests.compiled_here import aot_eager  # noqa: F401
from tests.torch_here import CAN_SHARD, takes_compiled, takes_shards
from tests.unit.flash.ranks.world import FSDP_OR_DDP
from tests.unit.runner.rank_outcomes import TINY, figures, left_by_ranks, ok, spec


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


@pytest.mark.parametrize("gbps", [400.0, 100.0])
def test_what_a_simulated_rank_sends_is_computed_from_the_stated_link(
    monkeypatch: pytest.MonkeyPatch, gbps: float
) -> None:
    monkeypatch.setattr(time, "measure_rank", lambda spec, files, progress: figures([10.0, 10.0], 1))
    result = measure_or_explain(spec(gpus=1, simulate_world=8, link_gbps=gbps))
    assert result.ranks["simulated"]
    assert result.ranks["link"] == {"gbps": gbps, "send_ms": pytest.approx(8e3 / gbps)}  # 10^9 bytes
    assert "collective_share" not in result.ranks
    assert result.notes[0]["sentence"].startswith("Simulated: one rank of 8")


@pytest.mark.slow
def test_two_real_processes_are_started_by_torch_and_measured() -> None:
    result = measure(spec(parallel=FSDP_OR_DDP))
    assert result.ok, result.reason
    assert len(result.ranks["time_ms"]) == 2
    assert set(result.ranks["collectives"]) == {"all-gather", "reduce-scatter" if CAN_SHARD else "all-reduce"}
    assert all(0 < share < 1 for share in result.ranks["collective_share"])


@takes_compiled
@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("method", ["standard", "flash"])
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=takes_shards)])
def test_a_rank_of_several_is_compiled(parallel: str, method: str, tmp_path: Path) -> None:
    compiled = replace(spec(gpus=1, simulate_world=2, parallel=parallel, compile="default"), method=method)
    try:
        figures = time.measure_rank(compiled, tmp_path)
    finally:
        dist.destroy_process_group()
    found = figures["timing"]["compilation"]
    assert found["graphs"] >= 1
    if parallel == "fsdp":  # its hooks would break a graph of the whole model, so blocks are compiled by themselves
        assert found["graph_breaks"] == 0
    assert found["recompiles"] == 0


@pytest.mark.usefixtures("aot_eager")
def test_ranks_take_as_many_steps_of_compilation_as_the_one_that_compiles_longest() -> None:
    elsewhere = iter([True, False, True, False, False])
    compiled = torch.compile(torch.sin, mode=None)
    compilation = Compilation.of(lambda: compiled(torch.ones(2)), None, no_progress, lambda here: next(elsewhere))
    assert compilation.steps == 5


@pytest.mark.parametrize("parallel", ["ddp", *(pytest.param(way, marks=takes_shards) for way in ("fsdp", "hsdp"))])
def test_one_rank_of_a_simulated_world_has_times_a_peak_and_collectives(parallel: str, tmp_path: Path) -> None:
    one = RunSpec(
        workload=TINY,
        method="flash",
        batch_size=2,
        seq_len=8,
        warmup=1,
        steps=2,
        simulate_world=4,
        parallel=parallel,
    )
    try:
        figures = time.measure_rank(one, tmp_path)
    finally:
        dist.destroy_process_group()
    assert len(figures["timing"]["step_ms"]) == 2
    assert figures["memory"]["peak_bytes"] > 0
    reduces = {"ddp": {"all-reduce"}, "fsdp": {"reduce-scatter"}, "hsdp": {"reduce-scatter", "all-reduce"}}[parallel]
    gathers = set() if parallel == "ddp" else {"all-gather"}
    assert set(figures["collectives"]) == reduces | gathers
    assert figures["collective_share"] is None
    # What a rank sends is of its group: of hsdp's two replicas, half of an all-reduce twice; of two shards, half.
    factors = {"ddp": 1.5, "fsdp": 0.75, "hsdp": 0.5}
    for name, each in figures["collectives"].items():
        expected = 1.0 if (parallel, name) == ("hsdp", "all-reduce") else factors[parallel]
        assert each["sent_bytes"] == pytest.approx(expected * each["bytes"], rel=1e-3)

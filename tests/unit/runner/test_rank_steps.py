"""What one rank measures."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dpscope.runner.rank_steps import measure_rank
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_one_rank_of_a_simulated_world_has_times_a_peak_and_collectives(parallel: str) -> None:
    spec = RunSpec(
        workload=PRESETS["tiny"],
        method="flash",
        batch_size=2,
        seq_len=8,
        warmup=1,
        steps=2,
        simulate_world=4,
        parallel=parallel,
    )
    try:
        figures = measure_rank(spec)
    finally:
        dist.destroy_process_group()
    assert len(figures["step_ms"]) == 2
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

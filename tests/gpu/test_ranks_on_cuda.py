"""Sharded models on a GPU: a world of one over NCCL, and one rank of a simulated world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import FlashEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.runner.measurements.time import measure_rank
from dpscope.runner.rank_check import check_ranks
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(*, sharded: bool, batch: int) -> dict[str, Tensor]:
    """Weights after three noisy steps of the fused update."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 7)).cuda()
    if sharded:
        mesh = init_device_mesh("cuda", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    engine = FlashEngine(model, max_grad_norm=0.5)
    optimizer = DPFlashOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        engine=engine,
        noise_multiplier=0.5,
        max_grad_norm=0.5,
        expected_batch_size=batch,
        generator=torch.Generator().manual_seed(1),
    )
    for step in range(3):
        torch.manual_seed(step)
        x, y = torch.randn(batch, 32, 64, device="cuda"), torch.randint(7, (batch,), device="cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(x).mean(1), y).backward()
        optimizer.step()
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    return {name: (p.full_tensor() if sharded else p).detach().clone() for name, p in parameters}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("batch", [1, 4])
def test_a_sharded_model_is_trained_as_a_whole_one(batch: int) -> None:
    sharded = trained(sharded=True, batch=batch)
    for name, value in trained(sharded=False, batch=batch).items():
        torch.testing.assert_close(sharded[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("method", "parallel"),
    [
        *((method, parallel) for method in ("standard", "flash") for parallel in ("ddp", "fsdp", "hsdp")),
        *(("flat", "ddp"), ("ghost", "ddp"), ("ghost", "fsdp")),
    ],
)
def test_one_rank_of_a_simulated_world_is_measured(parallel: str, method: str, tmp_path: Path) -> None:
    checkpointed = method in ("standard", "flash")  # Opacus cannot
    options: dict[str, Any] = {"dtype": "bf16", "checkpoint_blocks": checkpointed, "device": "cuda"}
    spec = RunSpec(
        workload=PRESETS["tiny"],
        method=method,
        batch_size=2,
        seq_len=64,
        simulate_world=8,
        parallel=parallel,
        warmup=1,
        steps=2,
        **options,
    )
    try:
        figures = measure_rank(spec, tmp_path)
    finally:
        dist.destroy_process_group()
    assert figures["memory"]["peak_bytes"] > 0
    assert figures["collectives"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_two_gpus_give_the_parameters_of_one(parallel: str) -> None:
    options: dict[str, Any] = {"gpus": 2, "parallel": parallel, "device": "cuda"}
    assert check_ranks(RunSpec(workload=PRESETS["tiny"], method="flash", batch_size=3, seq_len=32, **options)).ok

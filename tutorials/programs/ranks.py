"""One training step on several ranks, with DistributedDataParallel or FSDP2, timed and traced on every rank.

    python -m torch.distributed.run --nproc-per-node=2 programs/ranks.py --parallel ddp --out OUT

The backend is gloo, which runs on any machine: on a CPU, or with all ranks on one GPU, where gradients travel through
the host. What a collective costs here is not what NCCL costs; where it lies in the step and what it waits for is.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

WIDTH = {"cuda": 2048, "cpu": 256}
BATCH = {"cuda": 4096, "cpu": 64}
LAYERS = 6
REPEATS = 10


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    width = WIDTH[device]
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS))).to(device)


def parallel(model: nn.Sequential, how: str, bucket_mb: float) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        "cpu" if next(model.parameters()).device.type == "cpu" else "cuda", (dist.get_world_size(),)
    )
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def collective_by_size(device: str) -> list[dict[str, float]]:
    """Time all_reduce for larger and larger tensors: flat while latency dominates, then a line of bandwidth."""
    found = []
    for exponent in range(2, 23, 2):
        tensor = torch.ones(2**exponent, device=device)
        for _ in range(2):
            dist.all_reduce(tensor)
        took = []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            wait(device)
            took.append(1e3 * (time.perf_counter() - began))
        found.append({"bytes": 4 * 2**exponent, "median_ms": statistics.median(took)})
    return found


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def make_step(model: nn.Module, device: str, slow_ms: float) -> Callable[[], None]:
    """Return a training step; rank 1 sleeps for `slow_ms` first, as if its data came late."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seeded = torch.Generator(device).manual_seed(rank)
    batch = torch.randn(BATCH[device], WIDTH[device], device=device, generator=seeded)

    def step() -> None:
        if rank == 1 and slow_ms:
            with record_function("load the batch"):
                time.sleep(slow_ms / 1e3)
        with record_function("forward"):
            loss = model(batch).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], device: str) -> list[float]:
    """Return the milliseconds of steps that begin together on all ranks."""
    took = []
    for _ in range(3 + REPEATS):
        dist.barrier()
        wait(device)
        began = time.perf_counter()
        step()
        wait(device)
        took.append(1e3 * (time.perf_counter() - began))
    return took[3:]


def trace(step: Callable[[], None], device: str, path: Path) -> None:
    """Record two steps of this rank for Perfetto."""
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    ) as recording:
        for _ in range(2):
            dist.barrier()
            with record_function("step"):
                step()
                wait(device)
    recording.export_chrome_trace(str(path))
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One thing to run on all ranks, and the folder it is kept in."""

    parallel: str = "ddp"
    bucket_mb: float = 25.0
    slow_ms: float = 0.0
    collectives: bool = False


# What lesson 6 shows, by the folder it is kept in: one start of the ranks for all of it.
LESSON = {
    "ddp": Run(collectives=True),
    "small": Run(bucket_mb=0.3),
    "late": Run(slow_ms=20.0),
    "fsdp": Run(parallel="fsdp"),
}


def keep(run: Run, device: str, out: Path) -> None:
    """Time and trace one run on this rank, and write both down."""
    rank = dist.get_rank()
    out.mkdir(parents=True, exist_ok=True)
    step = make_step(parallel(network(device), run.parallel, run.bucket_mb), device, run.slow_ms)
    kept: dict[str, Any] = {
        "parallel": run.parallel,
        "backend": "gloo",
        "rank": rank,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "gradient_bytes": 4 * LAYERS * (WIDTH[device] ** 2 + WIDTH[device]),
        "step_ms": timed(step, device),
    }
    trace(step, device, out / f"{run.parallel}-rank{rank}.trace.json")
    if run.collectives:
        kept["all_reduce"] = collective_by_size(device)
    text = json.dumps(kept, indent=1)
    (out / f"{run.parallel}-rank{rank}.json").write_text(text + "\n", encoding="utf-8")
    if rank == 0:
        said = f"{run.parallel}, {kept['ranks']} ranks on gloo, {kept['hardware']}"
        print(f"{said}: {statistics.median(kept['step_ms']):.2f} ms a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="size of DDP's buckets of gradients")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="how long rank 1 sleeps before each step")
    parser.add_argument("--collectives", action="store_true", help="also time all_reduce by size")
    parser.add_argument("--lesson", action="store_true", help="all that lesson 6 shows, in folders of OUT")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    one = Run(parallel=asked.parallel, bucket_mb=asked.bucket_mb, slow_ms=asked.slow_ms, collectives=asked.collectives)
    dist.init_process_group("gloo")
    for name, run in (LESSON if asked.lesson else {"": one}).items():
        keep(run, asked.device, asked.out / name)
        dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit


if __name__ == "__main__":
    main()

"""The process group of a row that is spread over several processes, real or simulated."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec


def join_world(spec: RunSpec) -> int:
    """Make this process one of the spec's; its rank. Real processes are started by torch.distributed.run."""
    if spec.world_size == 1:
        return 0
    if not dist.is_initialized():
        if spec.simulate_world > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.simulate_world)
        else:
            _join(spec)
    return dist.get_rank()


def _join(spec: RunSpec) -> None:
    if spec.device == "cuda":
        found, place = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        if found < spec.gpus:
            raise UserError(
                f"--gpus {spec.gpus}, but this machine has {found}: give fewer, or --simulate-world {spec.gpus} for "
                "the time and peak of one rank without the others"
            )
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if spec.device == "cuda" else "gloo")

"""Assembly of a trainer and its batches from a run spec, in a process group if there are several processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from dpscope.errors import UserError
from dpscope.runner import collector
from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase, load_trainer, require_batch_of
from dpscope.vocabulary.methods import resolve_method
from dpscope.workloads.workload import Batch, Workload, build_model, build_workload


def join_world(spec: RunSpec) -> int:
    """Join the spec's processes and return this one's rank. Real processes are started by torch.distributed.run."""
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


def assemble(spec: RunSpec) -> tuple[TrainerBase, list[Batch]]:
    """Return the trainer of a spec and the batches of a step, all on the spec's device."""
    trainer_class = load_trainer(resolve_method(spec.method))
    collector.resume()  # before there is any tensor: instruments ask it for those
    rank = join_world(spec)
    workload, model = build(spec, spec.batch_size)
    trainer = trainer_class(model, workload.loss, spec.settings)
    # Last, so that what the model alone takes can be seen.
    seeds = range(spec.seed + rank * spec.accumulate, spec.seed + (rank + 1) * spec.accumulate)
    batches = [workload.batch(seed, torch.device(spec.device)) for seed in seeds]
    for batch in batches:
        require_batch_of(batch, spec.batch_size)
    return trainer, batches


def build(spec: RunSpec, batch_size: int) -> tuple[Workload, nn.Module]:
    """Return the workload of a spec with batches of a size, and its model, on the spec's device."""
    workload = build_workload(spec.workload, batch_size=batch_size, seq_len=spec.seq_len)
    torch.manual_seed(spec.seed)
    with torch.device(spec.device):  # parameters are born where they are used: no copy of a large model on the host
        return workload, build_model(workload, spec.param_dtype)


def make_trainer(spec: RunSpec) -> tuple[TrainerBase, Batch]:
    """Return the trainer and its batch, for steps of one batch."""
    trainer, (batch,) = assemble(spec)
    return trainer, batch

"""From a run spec to a trainer and the batches it trains on."""

from __future__ import annotations

import torch
from torch import nn

from dpscope.runner import collector
from dpscope.runner.spec import RunSpec
from dpscope.runner.world import join_world
from dpscope.trainers.base import TrainerBase, load_trainer, require_batch_of
from dpscope.vocabulary.methods import resolve_method
from dpscope.workloads.workload import Batch, Workload, build_model, build_workload


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
    """Return the same for steps of one batch."""
    trainer, (batch,) = assemble(spec)
    return trainer, batch

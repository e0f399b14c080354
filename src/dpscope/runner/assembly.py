"""From a run spec to a trainer and the batches it trains on."""

from __future__ import annotations

import torch

from dpscope.runner import collector
from dpscope.runner.spec import RunSpec
from dpscope.runner.world import join_world
from dpscope.trainers.base import TrainerBase, load_trainer, require_batch_of
from dpscope.vocabulary.methods import resolve_method
from dpscope.workloads.workload import Batch, build_model, build_workload


def assemble(spec: RunSpec) -> tuple[TrainerBase, list[Batch]]:
    """The trainer of a spec and the batches of a step, all on the spec's device."""
    trainer_class = load_trainer(resolve_method(spec.method))
    collector.resume()  # before there is any tensor: instruments ask it for those
    rank = join_world(spec)
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    device = torch.device(spec.device)
    torch.manual_seed(spec.seed)
    with device:  # parameters are born where they are used: no copy of a large model on the host
        model = build_model(workload, spec.param_dtype)
    trainer = trainer_class(model, workload.loss, spec.settings)
    # Last, so that what the model alone takes can be seen.
    batches = [workload.batch(spec.seed + rank * spec.accumulate + place, device) for place in range(spec.accumulate)]
    for batch in batches:
        require_batch_of(batch, spec.batch_size)
    return trainer, batches


def make_trainer(spec: RunSpec) -> tuple[TrainerBase, Batch]:
    """The same for steps of one batch."""
    trainer, (batch,) = assemble(spec)
    return trainer, batch

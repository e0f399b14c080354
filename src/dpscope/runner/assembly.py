"""From a run spec to a trainer and the batch it trains on."""

from __future__ import annotations

import torch

from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase, load_trainer, require_batch_of
from dpscope.vocabulary.methods import resolve_method
from dpscope.workloads.workload import Batch, build_workload


def make_trainer(spec: RunSpec) -> tuple[TrainerBase, Batch]:
    """The trainer of a spec and the batch it trains on, both on the spec's device."""
    trainer_class = load_trainer(resolve_method(spec.method))
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    device = torch.device(spec.device)
    torch.manual_seed(spec.seed)
    with device:  # parameters are born where they are used: no copy of a large model on the host
        model = workload.model()
    trainer = trainer_class(model, workload.loss, spec.settings)
    batch = workload.batch(spec.seed, device)  # last, so that what the model alone takes can be seen
    require_batch_of(batch, spec.batch_size)
    return trainer, batch

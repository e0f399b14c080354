"""Is a workload trained exactly? One noiseless step of plain SGD, held against micro-batches of one in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

# A step so large that the parameters' own size is lost in the rounding, and not the other way round.
LEARNING_RATE = 1e6


@pytest.fixture(scope="session")
def errors_of():
    """errors_of(spec): trainable parameter -> relative error of the clipped gradient that the method applied.

    A parameter whose gradient vanishes against the whole (a key's bias before a softmax) is measured against 1e-4 of
    the whole: what one sees of it is rounding.
    """
    import torch

    from dpscope.flash.oracle import run_oracle
    from dpscope.runner.steps import make_trainer
    from dpscope.workloads.workload import build_workload

    def find(spec):
        spec = replace(spec, noise_multiplier=0.0, optimizer="sgd", learning_rate=LEARNING_RATE)
        workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
        torch.manual_seed(spec.seed)
        truth = run_oracle(
            workload.model(),
            workload.batch(spec.seed, torch.device("cpu")),
            lambda model, batch: workload.loss(model, batch).mean(),
            max_grad_norm=spec.max_grad_norm,
            dtype=torch.float64,
        )
        assert (truth.factors < 1).any(), "no sample was clipped: nothing is proved"
        trainer, batch = make_trainer(spec)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train_step(batch)
        trained = [(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True) if p.requires_grad]
        total = math.sqrt(sum(float(wanted.square().sum()) for wanted in truth.clipped_sums.values()))
        errors = {}
        for (name, wanted), (p, old) in zip(truth.clipped_sums.items(), trained, strict=True):
            applied = (old - p.detach()).double() * (spec.batch_size / LEARNING_RATE)
            errors[name] = float((applied - wanted).norm()) / max(float(wanted.norm()), 1e-4 * total)
        return errors

    return find

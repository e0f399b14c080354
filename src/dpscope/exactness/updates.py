"""Updates of a method in one step, read off the parameters alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.audit.loop import Tensors
from dpscope.audit.memory import release_memory
from dpscope.audit.trainer import HUGE_LEARNING_RATE, StepSettings
from dpscope.batches import split_batch
from dpscope.errors import UserError
from dpscope.exactness.subject import Subject
from dpscope.trainers.base import TrainerBase
from dpscope.vocabulary.settings import TrainerSettings


@dataclass(frozen=True)
class Update:
    """One step without noise at one clip norm, converted back from its update lr/B Σ_b c_b v_b to the sum."""

    clip_norm: float
    sums: Tensors  # of trainable parameters; on the CPU
    moved_frozen: list[str]  # frozen parameters that are not where they were
    notes: list[str] = field(default_factory=list)  # what the trainer says about how it trains this model
    paths: Any = None  # what the method's engine says of each parameter, if it has one that explains itself


def measure_update(
    trainer_class: type[TrainerBase],
    subject: Subject,
    *,
    clip_norm: float,
    dtype: torch.dtype,
    seed: int,
    how: StepSettings,
    time_paths: bool = False,
) -> Update:
    """Take one step without noise. The method can draw only from `seed`; an exact step ignores it.

    `time_paths`: also time the paths of an engine that can explain them.
    """
    model, batch = subject.fresh(dtype)
    before = dict(subject.model.named_parameters())
    settings = TrainerSettings(
        **how.divide(subject.batch_size),
        optimizer="sgd",
        learning_rate=HUGE_LEARNING_RATE,
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        seed=seed,
    )
    torch.manual_seed(seed)
    trainer = trainer_class(model, subject.loss, settings)
    trainer.train_step(*split_batch(batch, how.accumulate))
    sums, moved, trainable = {}, [], set(subject.trainable)
    for name, after in _trained_parameters(trainer, model).items():
        step = (before[name].detach().to(dtype).double() - after.detach().double()).cpu()
        if name in trainable:
            sums[name] = (step * (subject.batch_size / HUGE_LEARNING_RATE)).to(dtype)
        elif step.any():
            moved.append(name)
    explain = getattr(getattr(trainer, "engine", None), "explain", None)
    notes = [note["sentence"] for note in trainer.notes()]
    paths = None if explain is None else explain(measured=True) if time_paths else explain()
    del trainer, model, explain, after
    release_memory()
    return Update(clip_norm, sums, moved, notes, paths)


def _trained_parameters(trainer: TrainerBase, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters after the step, under the model's own names. A trainer may wrap or copy the model."""
    own = dict(model.named_parameters())
    trained = list(trainer.model.parameters())
    if {id(p) for p in own.values()} & {id(p) for p in trained}:
        return dict(own)
    if [p.shape for p in trained] != [p.shape for p in own.values()]:
        raise UserError("the trainer's model has other parameters than the workload's: they cannot be held together")
    return dict(zip(own, trained, strict=True))

"""Updates of a method in one step, read off the parameters alone, and their errors.

A trainer is also made into a loop here, so that the methods dpscope compares pass the same tests as any training loop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.audit.loop import Loop, MakeLoop, Tensors, release_memory
from dpscope.batches import split_batch
from dpscope.errors import UserError
from dpscope.exactness.reference import (
    Reference,
    Turn,
    UpdateComparison,
    compare,
    factors_of,
    fit_factors,
    sample_gradients,
    weighted,
)
from dpscope.exactness.report import EXACT, MethodCheck, StepErrors
from dpscope.exactness.subject import Subject
from dpscope.random_states import seed_all
from dpscope.trainers.base import TrainerBase
from dpscope.vocabulary.settings import TrainerSettings
from dpscope.workloads.workload import Batch

# With a step this large the parameters' own size is lost in the rounding, and not the other way round. A power of two,
# so that nothing else is.
HUGE_LEARNING_RATE = 2.0**40
DATASET_BATCHES = 100  # batches in the data set that the accountant is told of


def physical_batch_size(samples: int, how: TrainerSettings) -> int:
    """Return the batch size of a trainer whose steps have this many samples."""
    if samples % how.accumulate:
        raise UserError(
            f"a batch of {samples} samples cannot be {how.accumulate} batches of one size: give a batch size that is a "
            f"multiple of {how.accumulate}"
        )
    return samples // how.accumulate


def _make_trainer(
    kind: type[TrainerBase], model: nn.Module, subject: Subject, how: TrainerSettings, **privacy: Any
) -> TrainerBase:
    """Return a trainer with plain SGD; `privacy`: noise multiplier, clip norm, seed."""
    sgd: dict[str, Any] = {"optimizer": "sgd", "learning_rate": HUGE_LEARNING_RATE, **privacy}
    return kind(model, subject.loss, replace(how, batch_size=physical_batch_size(subject.batch_size, how), **sgd))


def loop_maker(
    trainer_class: type[TrainerBase], subject: Subject, dtype: torch.dtype, how: TrainerSettings
) -> MakeLoop:
    """Return a function that makes loops of the method's trainer, for an audit."""

    def make_loop(*, noise_multiplier: float, max_grad_norm: float, seed: int) -> Loop:
        model, _ = subject.fresh(dtype)
        privacy = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm, "seed": seed}
        trainer = _make_trainer(trainer_class, model, subject, how, **privacy)
        rate, accountant = 1 / DATASET_BATCHES, None
        if attach := getattr(trainer.optimizer, "attach_step_hook", None):
            from opacus.accountants import RDPAccountant

            accountant = RDPAccountant()
            attach(accountant.get_optimizer_hook_fn(sample_rate=rate))

        def step(batch: Batch) -> None:
            trainer.train_step(*split_batch(batch, how.accumulate))

        return Loop(
            model=trained_model(trainer, model),
            step=step,
            scale=HUGE_LEARNING_RATE / subject.batch_size,
            accountant=accountant,
            sample_rate=rate,
            save=lambda: copy.deepcopy(trainer.optimizer.state_dict()),
            resume=trainer.optimizer.load_state_dict,
        )

    return make_loop


def trained_model(trainer: TrainerBase, model: nn.Module) -> nn.Module:
    """Return the module whose parameters move. A trainer may wrap the model it was given, or train a copy."""
    own = {id(p) for p in model.parameters()}
    return model if own & {id(p) for p in trainer.model.parameters()} else trainer.model


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
    how: TrainerSettings,
    time_paths: bool = False,
) -> Update:
    """Take one step without noise. The method can draw only from `seed`; an exact step ignores it.

    `time_paths`: also time the paths of an engine that can explain them.
    """
    model, batch = subject.fresh(dtype)
    before = dict(subject.model.named_parameters())
    seed_all(seed)
    privacy = {"noise_multiplier": 0.0, "max_grad_norm": clip_norm, "seed": seed}
    trainer = _make_trainer(trainer_class, model, subject, how, **privacy)
    trainer.train_step(*split_batch(batch, how.accumulate))
    sums, moved, trainable = {}, [], set(subject.trainable)
    own, trained = dict(model.named_parameters()), list(trained_model(trainer, model).parameters())
    if [p.shape for p in trained] != [p.shape for p in own.values()]:
        raise UserError("the trainer's model has other parameters than the workload's: they cannot be held together")
    for name, after in zip(own, trained, strict=True):  # under the model's own names
        step = (before[name].detach().to(dtype).double() - after.detach().double()).cpu()
        if name in trainable:
            sums[name] = (step * (subject.batch_size / HUGE_LEARNING_RATE)).to(dtype)
        elif step.any():
            moved.append(name)
    explain = getattr(getattr(trainer, "engine", None), "explain", None)
    notes = [note["sentence"] for note in trainer.notes()]
    paths = None if explain is None else explain(measured=True) if time_paths else explain()
    del trainer, model, explain, own, trained, after
    release_memory()
    return Update(clip_norm, sums, moved, notes, paths)


# Beyond this the samples' gradients are so nearly parallel that an update does not say who contributed what.
MAX_CONDITION = 1e3


def measure_errors(
    reference: Reference, clip_norms: Sequence[float], comparisons: Sequence[UpdateComparison]
) -> tuple[float | None, list[StepErrors]]:
    """Return the error of the norms, read off the step in which every factor is C/norm, and the errors of each step."""
    norm_error, steps = None, []
    for clip_norm, comparison in zip(clip_norms, comparisons, strict=True):
        by_parameter = comparison.errors
        fit = fit_factors(reference, comparison, reference.names)
        told = reference.norms > 0
        ratios = fit.factors[told] / reference.factors(clip_norm)[reference.names[0]][told]
        known = fit.condition < MAX_CONDITION and reference.clipping != "per_layer"  # one factor for all parameters
        norm_error = _largest(1 / ratios - 1) if known else None
        steps.append(
            StepErrors(
                clip_norm=clip_norm,
                clipped=int((reference.norms > clip_norm).sum()),
                factor_error=_largest(ratios - 1) if known else None,
                worst_parameter=max(by_parameter, key=lambda name: by_parameter[name]),
                parameter_errors=by_parameter,
            )
        )
    return norm_error, steps


def _largest(errors: Tensor) -> float:
    return float(errors.abs().nan_to_num(math.inf).max())


def measure_rounding(
    subject: Subject, reference: Reference, clip_norms: Sequence[float], dtype: torch.dtype
) -> MethodCheck:
    """Run micro-batches of one in the number format that is checked: the error of rounding alone."""
    if not clip_norms:  # no sample has a gradient of its own
        return MethodCheck("rounding", EXACT)
    found_norms = [
        {name: float(g.double().norm()) for name, g in found.items()}
        for found in sample_gradients(subject, dtype, reference.names)
    ]
    norms = {name: torch.tensor([each[name] for each in found_norms]) for name in reference.names}
    whole = torch.stack([each.square() for each in norms.values()]).sum(0)
    has_share = whole.isfinite() & (whole > 0)
    if not has_share.any():
        raise UserError(
            "in float32 the gradient of every sample is zero, inf or NaN, in float64 it is not: scale the loss to "
            "1e-38 to 1e38, give --dtype fp64, or look for state that the loss keeps"
        )
    factors = [factors_of(reference.clipping, norms, clip_norm) for clip_norm in clip_norms]

    def updates_of(turn: Turn) -> list[Tensors]:
        found = list(compress(sample_gradients(subject, dtype, list(turn)), has_share.tolist()))
        return [{n: weighted(own[n][has_share], [g[n].double() for g in found]) for n in turn} for own in factors]

    comparisons = compare(reference, [reference.factors(clip_norm) for clip_norm in clip_norms], updates_of)
    norm_error, steps = measure_errors(reference, clip_norms, comparisons)
    return MethodCheck("rounding", EXACT, norm_error=norm_error, steps=steps)

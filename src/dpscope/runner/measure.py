"""From a run spec to a result, in this very process: build the workload, the trainer, and take the measurement."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dpscope.instruments.peaks import cpu_peak, cuda_peak
from dpscope.instruments.timing import Progress, no_progress, time_steps
from dpscope.results.schema import FAILED, Result, result_for
from dpscope.runner import environment
from dpscope.runner.outcome import outcome_of_exception
from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase, TrainerSettings
from dpscope.trainers.registry import resolve_method
from dpscope.units import mib
from dpscope.workloads.workload import Batch, build_workload


def make_trainer(spec: RunSpec) -> tuple[TrainerBase, Batch]:
    """The trainer of a spec and the batch it trains on, both on the spec's device."""
    trainer_class = resolve_method(spec.method).load()
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    device = torch.device(spec.device)
    torch.manual_seed(spec.seed)
    with device:  # parameters are born where they are used: no copy of a large model on the host
        model = workload.model()
    settings = TrainerSettings(
        batch_size=spec.batch_size,
        dtype=spec.dtype,
        optimizer=spec.optimizer,
        learning_rate=spec.learning_rate,
        noise_multiplier=spec.noise_multiplier,
        max_grad_norm=spec.max_grad_norm,
        seed=spec.seed,
    )
    return trainer_class(model, workload.loss, settings), workload.batch(spec.seed, device)


def measure_time(spec: RunSpec, progress: Progress) -> Result:
    trainer, batch = make_trainer(spec)

    def step() -> object:
        return trainer.train_step(batch)

    timing = time_steps(step, device=spec.device, warmup=spec.warmup, steps=spec.steps, progress=progress)
    memory = cuda_peak() if spec.device == "cuda" else _cpu_peak(trainer, batch)
    return result_for(
        spec.to_dict(),
        avg_time_ms=timing.to_dict()["mean_ms"],
        peak_memory_mb=mib(memory["peak_bytes"]),
        timing=timing.to_dict(),
        memory=memory,
        environment=environment.collect(spec.device),
    )


def _cpu_peak(trainer: TrainerBase, batch: Batch) -> dict[str, Any]:
    trainer.optimizer.zero_grad(set_to_none=True)
    held = (trainer.model.state_dict(keep_vars=True), trainer.optimizer.state_dict(), batch)
    live = [leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor)]
    return cpu_peak(lambda: trainer.train_step(batch), live)


MEASUREMENTS = {"time": measure_time}


def measure(spec: RunSpec, progress: Progress = no_progress) -> Result:
    return MEASUREMENTS[spec.instrument](spec, progress)


def measure_or_explain(spec: RunSpec, progress: Progress = no_progress) -> Result:
    """The measurement, or a result that says why there is none. The traceback goes to standard error."""
    try:
        return measure(spec, progress)
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        details = traceback.format_exc() if status == FAILED else None
    # Outside the handler, so that the frames holding the memory that ran out are gone.
    where = environment.collect(spec.device)
    return result_for(spec.to_dict(), status=status, reason=reason, details=details, environment=where)

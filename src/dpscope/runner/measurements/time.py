"""How long a step takes, and the memory it peaked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dpscope.instruments.peaks import cpu_peak, cuda_peak
from dpscope.instruments.timing import Progress, time_steps
from dpscope.results.schema import Result, result_for
from dpscope.runner import environment
from dpscope.runner.assembly import make_trainer
from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase
from dpscope.units import mib
from dpscope.workloads.workload import Batch


def measure(spec: RunSpec, progress: Progress, files: Path) -> Result:
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

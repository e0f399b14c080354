"""How long a step takes, and the memory it peaked at."""

from __future__ import annotations

from pathlib import Path

from dpscope.flash.oracle import tensors_of
from dpscope.flash.ranks.shards import local
from dpscope.instruments.peaks import cpu_peak, cuda_peak
from dpscope.instruments.timing import Progress, time_steps
from dpscope.results.payloads.memory import MemoryPayload
from dpscope.results.schema import Result, result_for
from dpscope.runner import environment
from dpscope.runner.measurements.world import measure_world
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.units import mib


def measure_time(spec: RunSpec, progress: Progress, files: Path) -> Result:
    if spec.world_size > 1:
        return measure_world(spec, progress)
    step = TrainingSteps(spec)
    step.warm_up(progress)
    timing = time_steps(step, device=spec.device, warmup=0, steps=spec.steps, progress=progress)
    memory = peak_of(step, spec.device)
    step.require_finite()
    return result_for(
        spec.to_dict(),
        avg_time_ms=timing.to_dict()["mean_ms"],
        peak_memory_mb=mib(memory["peak_bytes"]),
        timing=timing.to_dict(),
        memory=memory,
        notes=step.trainer.notes(),
        environment=environment.collect(spec.device),
    )


def peak_of(step: TrainingSteps, device: str) -> MemoryPayload:
    """The peak of the steps so far on CUDA, that of one more step on the CPU."""
    return cuda_peak() if device == "cuda" else _cpu_peak(step)


def _cpu_peak(step: TrainingSteps) -> MemoryPayload:
    step.require_finite_losses()  # what is kept of the losses is none of the step's
    step.trainer.optimizer.zero_grad(set_to_none=True)
    held = (step.trainer.model.state_dict(keep_vars=True), step.trainer.optimizer.state_dict(), step.batches)
    return cpu_peak(step, map(local, tensors_of(held)))

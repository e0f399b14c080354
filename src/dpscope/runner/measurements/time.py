"""How long a step takes, and the memory it peaked at."""

from __future__ import annotations

from pathlib import Path

from dpscope.flash.oracle import tensors_of
from dpscope.instruments.peaks import cpu_peak, cuda_peak
from dpscope.instruments.timing import Progress, time_steps
from dpscope.results.payloads.memory import MemoryPayload
from dpscope.results.schema import Result, result_for
from dpscope.runner import environment
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.units import mib


def measure_time(spec: RunSpec, progress: Progress, files: Path) -> Result:
    step = TrainingSteps(spec)
    step.warm_up(progress)
    timing = time_steps(step, device=spec.device, warmup=0, steps=spec.steps, progress=progress)
    memory = cuda_peak() if spec.device == "cuda" else _cpu_peak(step)
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


def _cpu_peak(step: TrainingSteps) -> MemoryPayload:
    step.require_finite_losses()  # what is kept of the losses is none of the step's
    step.trainer.optimizer.zero_grad(set_to_none=True)
    held = (step.trainer.model.state_dict(keep_vars=True), step.trainer.optimizer.state_dict(), step.batches)
    return cpu_peak(step, tensors_of(held))

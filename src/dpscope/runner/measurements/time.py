"""Measurement of step time, and of the memory it peaked at."""

from __future__ import annotations

from pathlib import Path

from dpscope.instruments.timing import Progress, time_steps
from dpscope.results.schema import Result, result_for
from dpscope.runner.measurements.world import measure_rank, measure_world
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.units import mib

__all__ = ["measure_rank", "measure_time"]


def measure_time(spec: RunSpec, progress: Progress, files: Path) -> Result:
    if spec.world_size > 1:
        return measure_world(spec, progress, files)
    step = TrainingSteps(spec)
    step.warm_up(progress)
    timing = time_steps(step, device=spec.device, warmup=0, steps=spec.steps, progress=progress).to_dict()
    notes = step.notes()
    if step.compilation is not None:
        timing["compilation"] = step.compilation.to_dict()
    memory = step.peak()
    step.require_finite()
    return result_for(
        spec.to_dict(),
        avg_time_ms=timing["mean_ms"],
        peak_memory_mb=mib(memory["peak_bytes"]),
        timing=timing,
        memory=memory,
        notes=notes,
    )

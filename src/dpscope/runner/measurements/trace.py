"""Where a step's time goes, recorded with torch.profiler. Its times are never step times: those are `time`'s."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

from dpscope.errors import UserError
from dpscope.instruments.timing import Progress
from dpscope.instruments.trace.capture import Detail, record
from dpscope.instruments.trace.events import read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.results.schema import Result, result_for
from dpscope.runner import environment
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.schedules import make_schedule


def measure_trace(spec: RunSpec, progress: Progress, files: Path) -> Result:
    schedule = make_schedule(spec.option("schedule"), warmup=spec.warmup, active=spec.option("trace_steps"))
    detail = Detail(**{each.name: spec.option(each.name) for each in fields(Detail)})
    step = TrainingSteps(spec)
    step.compile(progress)
    if step.compilation is not None and detail.modules:
        raise UserError("a compiled graph has no modules: leave out --modules, or trace with --compile none")
    # Opacus wraps the model; its own modules keep their names.
    model = getattr(step.trainer.model, "_module", step.trainer.model)
    recording = record(
        step,
        files,
        device=spec.device,
        schedule=schedule,
        detail=detail,
        model=model,
        progress=progress,
    )
    step.require_finite()
    progress("reading the trace", 0, 1)
    summary = summarise([read_trace(path) for path in recording.paths])
    summary |= {"schedule": asdict(schedule), "detail": asdict(detail)}
    if recording.flops:
        summary["flops"] = recording.flops
    summary["files"] = {path.name: path.stat().st_size for path in recording.paths}
    return result_for(
        spec.to_dict(),
        trace=summary,
        files={path.name.removesuffix(".json.gz"): path.name for path in recording.paths},
        notes=step.notes(),
        environment=environment.collect(spec.device),
    )

"""Recording of a step with torch.profiler. Its times are never step times: those are `time`'s."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TypedDict

import torch.distributed as dist

from dpscope.errors import UserError
from dpscope.instruments.timing import Progress, no_progress
from dpscope.instruments.trace.capture import Detail, record
from dpscope.instruments.trace.events import read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.results.payloads.trace import TracePayload
from dpscope.results.schema import Note, Result, result_for
from dpscope.runner.measurements.time import notes_on_simulation
from dpscope.runner.ranks import run_ranks
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.instruments import ALL_RANKS, Schedule, make_schedule
from dpscope.vocabulary.settings import EAGER


class TracedSteps(TypedDict):
    """Record of one process. `trace` is None on a rank that took the steps without a profiler."""

    trace: TracePayload | None
    files: dict[str, str]  # what it is -> name
    notes: list[Note]


def measure_trace(spec: RunSpec, progress: Progress, files: Path) -> Result:
    ranks: list[TracedSteps]
    ranks = run_ranks(spec, progress, files) if spec.gpus > 1 else [trace_steps(spec, files, progress)]
    first = ranks[0]["trace"]
    assert first is not None
    traced = [(rank, each["trace"]) for rank, each in enumerate(ranks) if each["trace"] is not None]
    if len(traced) > 1:
        nothing = {"under_way_ms": 0.0}
        first["ranks"] = [
            {"rank": n, "step_ms": t["step_ms"], "under_way_ms": t.get("collectives", nothing)["under_way_ms"]}
            for n, t in traced
        ]
    return result_for(
        spec.to_dict(),
        trace=first,
        files={what: name for each in ranks for what, name in each["files"].items()},
        notes=[*notes_on_simulation(spec), *ranks[0]["notes"]],
    )


def measure_rank(spec: RunSpec, files: Path) -> TracedSteps:
    """Record one of several processes: rank 0, or every rank with `--rank all`."""
    step = TrainingSteps(spec)  # joins the others
    rank = dist.get_rank()
    if rank and spec.option("rank") != ALL_RANKS:
        for _ in range(_schedule(spec).steps):
            step()
        return {"trace": None, "files": {}, "notes": []}
    traced = trace_steps(spec, files / f"rank-{rank}", no_progress, step)
    return {**traced, "files": {f"rank {rank} {what}": f"rank-{rank}/{n}" for what, n in traced["files"].items()}}


def trace_steps(spec: RunSpec, files: Path, progress: Progress, step: TrainingSteps | None = None) -> TracedSteps:
    """Record the spec's steps in this process."""
    schedule = _schedule(spec)
    detail = Detail(**{each.name: spec.option(each.name) for each in fields(Detail)})
    if (spec.compile != EAGER or spec.cuda_graph) and detail.modules:
        raise UserError(
            "a compiled or captured graph has no modules: leave out --modules, or --compile and --cuda-graph"
        )
    step = step or TrainingSteps(spec)
    step.compile(progress)
    step.capture(progress)
    # Opacus and DDP wrap the model; its own modules keep their names.
    model = getattr(step.trainer.model, "_module", step.trainer.model)
    recording = record(
        step,
        files,
        device=spec.device,
        schedule=schedule,
        detail=detail,
        model=model if spec.world_size == 1 else step.trainer.plain_model,
        progress=progress,
    )
    if spec.world_size == 1:
        step.require_finite()
    step.require_finite_losses()
    progress("reading the trace", 0, 1)
    summary = summarise([read_trace(path) for path in recording.paths])
    summary |= {"schedule": asdict(schedule), "detail": asdict(detail)}
    if recording.flops:
        summary["flops"] = recording.flops
    summary["files"] = {path.name: path.stat().st_size for path in recording.paths}
    names = {path.name.removesuffix(".json.gz"): path.name for path in recording.paths}
    return {"trace": summary, "files": names, "notes": step.notes()}


def _schedule(spec: RunSpec) -> Schedule:
    return make_schedule(spec.option("schedule"), warmup=spec.warmup, active=spec.option("trace_steps"))

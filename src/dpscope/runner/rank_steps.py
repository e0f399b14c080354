"""One rank of a measurement over several processes: `python -m dpscope.runner.rank_steps SPEC FILES FOLDER`.

torch.distributed.run starts it once a rank. Each leaves FOLDER/RANK.json: what it saw, or how it failed; what is kept
beside the row's figures goes to FILES.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, TypedDict

from dpscope.instruments.processes import end_with_lifeline
from dpscope.instruments.timing import Progress, no_progress, time_steps
from dpscope.results.payloads.memory import MemoryPayload
from dpscope.results.payloads.ranks import Collective
from dpscope.results.schema import Note
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.exit_codes import ALL_OK, SOME_NOT_OK
from dpscope.vocabulary.schedules import Schedule
from dpscope.vocabulary.statuses import OK


class RankFigures(TypedDict):
    step_ms: list[float]
    memory: MemoryPayload
    collectives: dict[str, Collective]  # of a step
    collective_share: float | None  # of a profiled step; None in a simulated world, where they take no time
    notes: list[Note]


class RankOutcome(TypedDict):
    status: str
    reason: str | None
    figures: Any  # RankFigures, or what a traced rank saw


def measure_rank(spec: RunSpec, progress: Progress = no_progress) -> RankFigures:
    """What this process sees of the spec's steps."""
    import torch

    from dpscope.instruments.collectives import CollectiveBytes

    step = TrainingSteps(spec)
    if spec.device == "cuda":  # a model is whole where it is born, before it is sharded
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step.warm_up(progress)
    with CollectiveBytes() as seen:
        step()
    timing = time_steps(step, device=spec.device, warmup=0, steps=spec.steps, progress=progress)
    memory = step.peak()
    share = None if spec.simulate_world > 1 else _share_of_collectives(step, spec.device)
    step.require_finite_losses()
    return {
        "step_ms": timing.step_ms,
        "memory": memory,
        "collectives": seen.collectives,
        "collective_share": share,
        "notes": step.notes(),
    }


def _share_of_collectives(step: TrainingSteps, device: str) -> float:
    """How much of a step, recorded with torch.profiler, has a collective under way."""
    from dpscope.instruments.trace.capture import record
    from dpscope.instruments.trace.collectives import collective_time
    from dpscope.instruments.trace.events import read_trace

    with tempfile.TemporaryDirectory() as folder:
        recording = record(step, Path(folder), device=device, schedule=Schedule(active=1))
        found = collective_time([read_trace(path) for path in recording.paths])
    return found["under_way_ms"] / found["step_ms"]


def _look(spec: RunSpec, files: Path) -> Any:
    if spec.instrument == "trace":
        from dpscope.runner.measurements.trace import trace_rank

        return trace_rank(spec, files)
    return measure_rank(spec)


def _measure_or_explain(spec: RunSpec, files: Path) -> RankOutcome:
    from dpscope.outcomes import outcome_of_exception

    try:
        return {"status": OK, "reason": None, "figures": _look(spec, files)}
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        return {"status": status, "reason": reason, "figures": None}


def main() -> None:
    end_with_lifeline()
    spec, files, folder = RunSpec.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    outcome = _measure_or_explain(spec, files)
    path = folder / f"{os.environ['RANK']}.json"
    path.with_suffix(".tmp").write_text(json.dumps(outcome), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads abort now and then when a process ends by itself.
    os._exit(ALL_OK if outcome["status"] == OK else SOME_NOT_OK)


if __name__ == "__main__":
    main()

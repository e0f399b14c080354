"""One rank of a measurement over several processes: `python -m dpscope.runner.rank_steps SPEC FOLDER`.

torch.distributed.run starts it once a rank. Each leaves FOLDER/RANK.json: what it saw, or how it failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TypedDict

from dpscope.instruments.processes import end_with_lifeline
from dpscope.instruments.timing import Progress, no_progress, time_steps
from dpscope.results.payloads.memory import MemoryPayload
from dpscope.results.schema import Note
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.exit_codes import ALL_OK, SOME_NOT_OK
from dpscope.vocabulary.statuses import OK


class RankFigures(TypedDict):
    step_ms: list[float]
    memory: MemoryPayload
    collectives: dict[str, int]  # bytes of a step, by collective
    notes: list[Note]


class RankOutcome(TypedDict):
    status: str
    reason: str | None
    figures: RankFigures | None


def measure_rank(spec: RunSpec, progress: Progress = no_progress) -> RankFigures:
    """What this process sees of the spec's steps."""
    import torch

    from dpscope.instruments.collectives import CollectiveBytes
    from dpscope.runner.steps import TrainingSteps

    step = TrainingSteps(spec)
    if spec.device == "cuda":  # a model is whole where it is born, before it is sharded
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step.warm_up(progress)
    with CollectiveBytes() as seen:
        step()
    timing = time_steps(step, device=spec.device, warmup=0, steps=spec.steps, progress=progress)
    memory = step.peak()
    step.require_finite_losses()
    return {
        "step_ms": timing.step_ms,
        "memory": memory,
        "collectives": seen.bytes,
        "notes": step.notes(),
    }


def _measure_or_explain(spec: RunSpec) -> RankOutcome:
    from dpscope.outcomes import outcome_of_exception

    try:
        return {"status": OK, "reason": None, "figures": measure_rank(spec)}
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        return {"status": status, "reason": reason, "figures": None}


def main() -> None:
    end_with_lifeline()
    spec, folder = RunSpec.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])
    outcome = _measure_or_explain(spec)
    path = folder / f"{os.environ['RANK']}.json"
    path.with_suffix(".tmp").write_text(json.dumps(outcome), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads abort now and then when a process ends by itself.
    os._exit(ALL_OK if outcome["status"] == OK else SOME_NOT_OK)


if __name__ == "__main__":
    main()

"""A row on several processes: the launcher, and one rank, `python -m dpscope.runner.ranks SPEC MODULE FILES FOLDER`.

`torch.distributed.run` starts a rank on each process. It is a child of the row's, so that all ranks are in the row's
process group. Each writes FOLDER/RANK.json with what MODULE's `measure_rank` returned, or how it failed. Further files
of the row go to FILES.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from dpscope.endings import outcome_of_exception, outcome_of_exit
from dpscope.errors import RankEnded
from dpscope.instruments.processes import end_with_lifeline, run_limited
from dpscope.instruments.timing import Progress
from dpscope.results.store import write_atomically
from dpscope.runner import worker
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.statuses import ALL_OK, FAILED, OK, OOM, SKIPPED, SOME_NOT_OK

# Signals that end a process, but for SIGTERM, by which torch.distributed.run ends those that are left.
_KILLED = {-number for number in signal.Signals if number != signal.SIGTERM}
_TELLING = (SKIPPED, OOM, FAILED)  # of several outcomes, the one that says most


class RankOutcome(TypedDict):
    """File that a rank leaves: its figures, or how it ended."""

    status: str
    reason: str | None
    figures: Any  # what `measure_rank` of the instrument's measurement returned


def run_ranks(spec: RunSpec, progress: Progress, files: Path, *, module: str | None = None) -> list[Any]:
    """Run the ranks of a spec and return what each measured. Raise `RankEnded` otherwise.

    `module`: the one that measures a rank, if it is not that of the spec's instrument.
    """
    with tempfile.TemporaryDirectory() as folder:
        progress(f"{spec.gpus} ranks", 0, 1)
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.gpus}"]
        asked = [json.dumps(spec.to_dict()), module or f"dpscope.runner.measurements.{spec.instrument}"]
        finished = run_limited([*run, "-m", "dpscope.runner.ranks", *asked, str(files), folder])
        if module is None:
            print(finished.output, file=sys.stderr)  # into the row's log
        left = [Path(folder) / f"{rank}.json" for rank in range(spec.gpus)]
        outcomes = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in left]
    _require_figures(outcomes, finished.output)
    return [outcome["figures"] for outcome in outcomes if outcome is not None]


def _require_figures(outcomes: Sequence[RankOutcome | None], output: str) -> None:
    """Raise `RankEnded` unless every rank has figures; the reason is the rank's own report, or its exit code.

    If a rank was killed, others fail because of it, so the killed rank is named first.
    """
    told = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None and outcome["status"] != OK]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    # Rank and exit code of those that torch.distributed.run reports as failed.
    reported = re.findall(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)", output)
    codes = {int(rank): int(code) for rank, code in reported}
    killed = {rank: code for rank, code in codes.items() if rank in silent and code in _KILLED}
    telling = [(rank, outcome) for rank, outcome in told if outcome["status"] != FAILED or not killed]
    if telling:
        rank, first = min(telling, key=lambda pair: _TELLING.index(pair[1]["status"]))
        raise RankEnded(first["status"], f"rank {rank}: {first['reason']}")
    for rank, code in killed.items():
        status, reason = outcome_of_exit(code, output, oom_killed=False)
        raise RankEnded(status, f"rank {rank}: {reason}")
    if silent:
        raise RankEnded(FAILED, f"rank {silent[0]} ended without a result; the log says what it printed last")


def measure_or_explain_rank(spec: RunSpec, module: str, files: Path) -> RankOutcome:
    """Measure this rank, or say why it could not. The traceback goes to standard error."""
    try:
        figures = importlib.import_module(module).measure_rank(spec, files)
        return {"status": OK, "reason": None, "figures": figures}
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        return {"status": status, "reason": reason, "figures": None}


def main() -> None:
    worker.rest_collector()
    end_with_lifeline()
    spec, module, files, folder = sys.argv[-4:]
    outcome = measure_or_explain_rank(RunSpec.from_dict(json.loads(spec)), module, Path(files))
    write_atomically(Path(folder) / f"{os.environ['RANK']}.json", json.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ALL_OK if outcome["status"] == OK else SOME_NOT_OK)  # gloo's threads sometimes abort at a normal exit


if __name__ == "__main__":
    main()

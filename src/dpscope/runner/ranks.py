"""A row on several processes: the launcher, and one rank, `python -m dpscope.runner.ranks SPEC FILES FOLDER`.

`torch.distributed.run` starts a rank on each process. It is a child of the row's, so that all ranks are in the row's
process group. Each writes FOLDER/RANK.json with what it measured, or how it failed. Further files of the row go to
FILES.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypedDict

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


def run_ranks(spec: RunSpec, progress: Progress, files: Path) -> list[Any]:
    """Run the ranks of a spec and return what each measured. Raise `RankEnded` otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        progress(f"{spec.gpus} ranks", 0, 1)
        finished = run_limited(rank_command("ranks", spec, files, Path(folder)))
        print(finished.output, file=sys.stderr)
        outcomes = [_read(Path(folder) / f"{rank}.json") for rank in range(spec.gpus)]
    _require_figures(outcomes, finished.output)
    return [outcome["figures"] for outcome in outcomes if outcome is not None]


def _require_figures(outcomes: Sequence[RankOutcome | None], output: str) -> None:
    """Raise `RankEnded` unless every rank has figures; the reason is the rank's own report, or its exit code.

    If a rank was killed, others fail because of it, so the killed rank is named first.
    """
    told = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None and outcome["status"] != OK]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    killed = {rank: code for rank, code in _exit_codes(output).items() if rank in silent and code in _KILLED}
    telling = [(rank, outcome) for rank, outcome in told if outcome["status"] != FAILED or not killed]
    if telling:
        rank, first = min(telling, key=lambda pair: _TELLING.index(pair[1]["status"]))
        raise RankEnded(first["status"], f"rank {rank}: {first['reason']}")
    for rank, code in killed.items():
        status, reason = outcome_of_exit(code, output, oom_killed=False)
        raise RankEnded(status, f"rank {rank}: {reason}")
    if silent:
        raise RankEnded(FAILED, f"rank {silent[0]} ended without a result; the log says what it printed last")


def _exit_codes(output: str) -> dict[int, int]:
    """Rank -> exit code, of those that torch.distributed.run reports as failed."""
    pairs = re.findall(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)", output)
    return {int(rank): int(code) for rank, code in pairs}


def rank_command(program: str, spec: RunSpec, *files: Path) -> list[str]:
    """Return the command that runs a program of `runner/` on every rank of a spec."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.gpus}"]
    return [*run, "-m", f"dpscope.runner.{program}", json.dumps(spec.to_dict()), *map(str, files)]


def end_rank(*, ok: bool) -> NoReturn:
    """Exit this process at once, because gloo's threads sometimes abort at a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ALL_OK if ok else SOME_NOT_OK)


def _read(path: Path) -> RankOutcome | None:
    if not path.exists():
        return None
    outcome: RankOutcome = json.loads(path.read_text(encoding="utf-8"))
    return outcome


def measure_or_explain_rank(spec: RunSpec, files: Path) -> RankOutcome:
    """Measure this rank, or say why it could not. The traceback goes to standard error."""
    from dpscope.runner.measure import measurement_module

    try:
        figures = measurement_module(spec.instrument).measure_rank(spec, files)
        return {"status": OK, "reason": None, "figures": figures}
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        return {"status": status, "reason": reason, "figures": None}


def main() -> None:
    worker.rest_collector()
    end_with_lifeline()
    spec, files, folder = RunSpec.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    outcome = measure_or_explain_rank(spec, files)
    write_atomically(folder / f"{os.environ['RANK']}.json", json.dumps(outcome))
    end_rank(ok=outcome["status"] == OK)


if __name__ == "__main__":
    main()

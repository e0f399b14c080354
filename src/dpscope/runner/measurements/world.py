"""Time and peak of a step over several processes: that of the slowest rank, and of the rank that needs most.

The row's child starts `torch.distributed.run`, so that all ranks are in the row's process group, and puts together what
they leave. A simulated world is one process, this one, and none of the others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dpscope.instruments.processes import run_limited
from dpscope.instruments.timing import Progress, Timing
from dpscope.results.schema import Note, Result, result_for
from dpscope.runner import environment
from dpscope.runner.rank_steps import RankFigures, RankOutcome, measure_rank
from dpscope.runner.spec import RunSpec
from dpscope.units import format_bytes, mib
from dpscope.vocabulary.statuses import FAILED, OK, OOM, SKIPPED

LINK_BYTES_PER_SECOND = 50e9  # 400 Gbit/s: what a rank's share of one network card gives
_TELLING = (SKIPPED, OOM, FAILED)  # of several outcomes, the one that says most


def rank_command(spec: RunSpec, folder: Path) -> list[str]:
    """The command that runs a spec on all its ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.gpus}"]
    return [*run, "-m", "dpscope.runner.rank_steps", json.dumps(spec.to_dict()), str(folder)]


def measure_world(spec: RunSpec, progress: Progress) -> Result:
    if spec.simulate_world > 1:
        return _put_together(spec, [measure_rank(spec, progress)])
    with tempfile.TemporaryDirectory() as folder:
        progress(f"{spec.gpus} ranks", 0, 1)
        finished = run_limited(rank_command(spec, Path(folder)))
        print(finished.output, file=sys.stderr)
        outcomes = [_read(Path(folder) / f"{rank}.json") for rank in range(spec.gpus)]
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is None or outcome["status"] != OK]
    told = [(rank, outcome) for rank, outcome in failed if outcome is not None]
    if failed:
        told.sort(key=lambda pair: _TELLING.index(pair[1]["status"]) if pair[1]["status"] in _TELLING else 0)
        status, reason = FAILED, f"rank {failed[0][0]} ended without a result; the log says what it printed last"
        if told:
            status, reason = told[0][1]["status"], f"rank {told[0][0]}: {told[0][1]['reason']}"
        return result_for(spec.to_dict(), status=status, reason=reason, environment=environment.collect(spec.device))
    return _put_together(spec, [outcome["figures"] for outcome in outcomes if outcome and outcome["figures"]])


def _read(path: Path) -> RankOutcome | None:
    if not path.exists():
        return None
    outcome: RankOutcome = json.loads(path.read_text(encoding="utf-8"))
    return outcome


def _put_together(spec: RunSpec, ranks: Sequence[RankFigures]) -> Result:
    # A step is over when the slowest rank is.
    timing = Timing([max(times) for times in zip(*(rank["step_ms"] for rank in ranks), strict=True)])
    memory = max((rank["memory"] for rank in ranks), key=lambda each: each["peak_bytes"])
    return result_for(
        spec.to_dict(),
        avg_time_ms=timing.to_dict()["mean_ms"],
        peak_memory_mb=mib(memory["peak_bytes"]),
        timing=timing.to_dict(),
        memory=memory,
        notes=[_note_on_ranks(spec, ranks, timing), *ranks[0]["notes"]],
        environment=environment.collect(spec.device),
    )


def _note_on_ranks(spec: RunSpec, ranks: Sequence[RankFigures], timing: Timing) -> Note:
    """What each rank took, and what travelled between them."""
    medians = [Timing(rank["step_ms"]).median_ms for rank in ranks]
    peaks = [rank["memory"]["peak_bytes"] for rank in ranks]
    moved = ranks[0]["collectives"]
    travelled = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(moved.items())) or "nothing"
    link_ms = 1e3 * sum(moved.values()) / LINK_BYTES_PER_SECOND
    share = f"{link_ms:.3g} ms at 50 GB/s, {link_ms / timing.median_ms:.0%} of the step if nothing overlapped"
    if spec.simulate_world > 1:
        sentence = (
            f"Simulated: one rank of {spec.simulate_world} ({spec.parallel}) without the others. Collectives return at "
            f"once, so neither their time nor waiting is in the figures; a step would move {travelled} ({share})."
        )
    else:
        sentence = (
            f"{spec.gpus} ranks ({spec.parallel}), each with its own batch; the time is that of the slowest. By rank: "
            f"{', '.join(f'{each:.4g}' for each in medians)} ms, peaks {', '.join(map(format_bytes, peaks))}. "
            f"Collectives of a step: {travelled} ({share})."
        )
    return {
        "topic": "ranks",
        "sentence": sentence,
        "time_ms_by_rank": medians,
        "peak_bytes_by_rank": peaks,
        "bytes_by_collective": moved,
    }

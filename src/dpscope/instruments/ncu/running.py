"""Runs ncu around a program, with a time limit, and again without the metrics and options that it refuses."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dpscope.instruments.ncu.failures import took_too_long, unknown_metrics, why_no_counts
from dpscope.instruments.ncu.metrics import DRAM_READ, KERNEL_METRICS
from dpscope.instruments.nsight import unknown_option
from dpscope.instruments.processes import FinishedCommand, OnLine, run_limited

ATTEMPTS = 6  # each but the last may lose metrics or options that this ncu or this GPU does not know
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class NcuCapture:
    """A report, or the sentence that says why there is none.

    `refused`: metrics that this GPU does not have and options that this ncu does not know.
    """

    command: list[str]
    output: str
    failure: str | None = None
    refused: list[str] = field(default_factory=list)


def try_counters(ncu: str) -> str | None:
    """Return why counters cannot be read, or None. It counts one small kernel to find out."""
    done = _try_kernel(ncu, [DRAM_READ])
    if done.timed_out:
        return took_too_long(PROBE_SECONDS)
    counted = DRAM_READ in done.output and "==ERROR==" not in done.output
    return None if counted else why_no_counts(done.output, done.returncode)


def one_pass_metrics(ncu: str, tensor_operations: str) -> tuple[str, ...]:
    """Return the metrics of a kernel that fit in one pass, tried on one small kernel: chips differ."""
    wanted = (*KERNEL_METRICS, tensor_operations)
    passes = re.search(r"- (\d+) pass", _try_kernel(ncu, wanted).output)
    return wanted if passes is not None and passes.group(1) == "1" else KERNEL_METRICS


def _try_kernel(ncu: str, metrics: Sequence[str]) -> FinishedCommand:
    script = "import torch; torch.ones(1 << 20, device='cuda').mul_(2); torch.cuda.synchronize()"
    options = [f"--metrics={','.join(metrics)}", "--launch-count=1", "--clock-control=none"]
    return run_limited([ncu, *options, sys.executable, "-c", script], limit=PROBE_SECONDS)


def take_report(
    make_command: Callable[[Sequence[str]], list[str]],
    metrics: Sequence[str],
    report: Path,
    *,
    limit: float,
    on_line: OnLine = lambda line: None,
    may_be_cut: bool = False,
) -> NcuCapture:
    """Run ncu until it leaves `report`, dropping metrics and options that it refuses.

    `make_command` turns the metrics that are left into a command. `may_be_cut`: the program ends itself when its time
    is over, which ncu calls an error and keeps what it has counted.
    """
    wanted, refused = list(metrics), list[str]()
    deadline = time.monotonic() + limit
    for _ in range(ATTEMPTS):
        command = [part for part in make_command(wanted) if part.partition("=")[0] not in refused]
        report.unlink(missing_ok=True)
        done = run_limited(command, limit=max(deadline - time.monotonic(), 1.0), on_line=on_line)
        lacking = [name for name in unknown_metrics(done.output) if name in wanted]
        option = unknown_option(done.output)
        taken = report.exists() and (done.returncode == 0 or may_be_cut)
        if done.timed_out or taken:
            break
        if lacking and len(lacking) < len(wanted):
            wanted = [name for name in wanted if name not in lacking]
            refused += lacking
        elif option in {part.partition("=")[0] for part in command}:
            refused.append(str(option))
        else:
            break
    if done.timed_out:
        failure: str | None = took_too_long(limit)
    elif taken:
        failure = None
    else:
        failure = why_no_counts(done.output, done.returncode)
    return NcuCapture(command, done.output, failure, refused)

"""Runs ncu around a program, with a limit in time, and asks again for less where ncu does not know what was asked."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dpscope.instruments.ncu.failures import explain, took_too_long, unknown_metrics, unknown_option
from dpscope.instruments.ncu.metrics import DRAM_READ, KERNEL_EXTRAS, KERNEL_METRICS

ATTEMPTS = 6  # each but the last may lose metrics or options that this ncu or this GPU does not know
DRAIN_SECONDS = 5.0
ORPHANED = 3  # exit code
PROBE_SECONDS = 120.0

LIFELINE = "DPSCOPE_LIFELINE"  # environment variable: which pipe on standard input is the lifeline

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """How a command ended and what it printed, both streams together."""

    returncode: int
    output: str
    timed_out: bool = False


@dataclass(frozen=True)
class Capture:
    """A report, or the sentence that says why there is none.

    `refused`: metrics that this GPU does not have and options that this ncu does not know.
    """

    command: list[str]
    output: str
    failure: str | None = None
    refused: list[str] = field(default_factory=list)


def run_limited(command: Sequence[str], *, limit: float, on_line: OnLine = lambda line: None) -> Finished:
    """Run a command and hand on its lines as they come. Past `limit` seconds it is ended with all it has started.

    Its standard input is a pipe that nobody writes to and that closes when this process dies (`end_with_lifeline`).
    """
    lifeline, held = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            stdin=lifeline,
            env={**os.environ, LIFELINE: str(os.fstat(lifeline).st_ino)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        os.close(held)
        return Finished(127, f"{command[0]}: {error.strerror}")
    finally:
        os.close(lifeline)
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process.stdout, lines, on_line), daemon=True)
    reader.start()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        timed_out = process.returncode is None
        if timed_out:
            end_with_descendants(process.pid)
            process.wait()
        os.close(held)
    reader.join(DRAIN_SECONDS)
    return Finished(process.returncode, "".join(lines), timed_out)


def _read(stream: IO[str], lines: list[str], on_line: OnLine) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            on_line(line)


def end_with_descendants(pid: int) -> None:
    """Kill a process and all it has started. The process is stopped first, so that it starts no more meanwhile.

    (Not by its group: it stays in ours, so that whoever ends our group ends it too.)
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for child in _children(pid):
        end_with_descendants(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(stat.parent.name))
    return children


def end_with_lifeline() -> None:
    """In a program that `run_limited` started, at whatever remove: end when the process that called it is gone."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(ORPHANED)

    if os.environ.get(LIFELINE) == str(os.fstat(0).st_ino):  # a program that ncu started may have been given another
        threading.Thread(target=wait, daemon=True).start()


def try_counters(ncu: str) -> str | None:
    """Count one small kernel: the only sure way to know whether counters may be read. The trouble, or None."""
    done = _try_kernel(ncu, [DRAM_READ])
    if done.timed_out:
        return took_too_long(PROBE_SECONDS)
    counted = DRAM_READ in done.output and "==ERROR==" not in done.output
    return None if counted else explain(done.output, done.returncode)


def one_pass_metrics(ncu: str) -> tuple[str, ...]:
    """What can be counted of a kernel without running it twice, tried on one small kernel: chips differ."""
    for extras in KERNEL_EXTRAS:
        passes = re.search(r"- (\d+) pass", _try_kernel(ncu, [*KERNEL_METRICS, *extras]).output)
        if passes is not None and passes.group(1) == "1":
            return (*KERNEL_METRICS, *extras)
    return KERNEL_METRICS


def _try_kernel(ncu: str, metrics: Sequence[str]) -> Finished:
    script = "import torch; torch.ones(1 << 20, device='cuda').mul_(2); torch.cuda.synchronize()"
    options = [f"--metrics={','.join(metrics)}", "--launch-count=1", "--clock-control=none"]
    return run_limited([ncu, *options, sys.executable, "-c", script], limit=PROBE_SECONDS)


def capture(
    make_command: Callable[[Sequence[str]], list[str]],
    metrics: Sequence[str],
    report: Path,
    *,
    limit: float,
    on_line: OnLine = lambda line: None,
) -> Capture:
    """Run ncu until it leaves `report`, dropping metrics and options that it refuses.

    `make_command` turns the metrics that are left into a command.
    """
    wanted, refused = list(metrics), list[str]()
    deadline = time.monotonic() + limit
    for _ in range(ATTEMPTS):
        command = [part for part in make_command(wanted) if part.partition("=")[0] not in refused]
        report.unlink(missing_ok=True)
        done = run_limited(command, limit=max(deadline - time.monotonic(), 1.0), on_line=on_line)
        lacking = [name for name in unknown_metrics(done.output) if name in wanted]
        option = unknown_option(done.output)
        if done.timed_out or (done.returncode == 0 and report.exists()):
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
    elif done.returncode == 0 and report.exists():
        failure = None
    else:
        failure = explain(done.output, done.returncode)
    return Capture(command, done.output, failure, refused)

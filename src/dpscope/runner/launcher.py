"""The parent's side of one measurement: start a child, watch it, and turn its ending into a result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dpscope import numbers
from dpscope.endings import outcome_of_exit
from dpscope.errors import UserError
from dpscope.results.schema import Result, UnreadableResult, result_for
from dpscope.results.store import ResultStore, read_result
from dpscope.runner.spec import RunSpec
from dpscope.units import format_duration
from dpscope.vocabulary.statuses import DISK_FULL, TIMEOUT

WORKER = (sys.executable, "-m", "dpscope.runner.worker")

ROW_SECONDS = "DPSCOPE_ROW_SECONDS"  # environment variable: how long the child may take before it is ended

ProgressListener = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a child; one that exceeds them is killed."""

    timeout: float | None = None  # seconds
    memory: float | None = None  # bytes of data (CPU)

    def __post_init__(self) -> None:
        for name, check in (("timeout", numbers.TIMEOUT_SECONDS), ("memory", numbers.MEMORY_LIMIT)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(value))

    @property
    def in_words(self) -> str:
        """The time limit for people."""
        seconds = self.timeout or 0
        return f"{seconds:g} s" if 0 < seconds < 1 else format_duration(seconds)


def launch(
    spec: RunSpec,
    store: ResultStore,
    *,
    limits: Limits,
    on_progress: ProgressListener,
    worker: tuple[str, ...] = WORKER,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Measure one spec in a process of its own. Every ending of the child becomes a result, unless the disk is full.

    `environment`: variables that the child has beside those of this process.
    """
    own = dict(environment or {}) | ({} if limits.timeout is None else {ROW_SECONDS: str(limits.timeout)})
    store.make_way(spec.file_name)
    output = store.path_of(spec.file_name)
    log = store.log_of(spec.file_name)
    kills_before = _oom_kills()
    with log.open("w", encoding="utf-8") as log_file:
        # A session of its own: Ctrl-C reaches the parent alone, and the whole group can be ended at once.
        child = subprocess.Popen(
            worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            env={**os.environ, **own},
        )
        try:
            timed_out = _follow(child, spec, store, limits, on_progress)
        finally:
            _end(child)
    if child.returncode == DISK_FULL:
        raise UserError(
            f"no room for the files of {spec.label} in {store.folder} or in TMPDIR ({tempfile.gettempdir()}): free "
            "some space, or set TMPDIR to a folder that has some"
        )
    if timed_out:
        limit = limits.in_words
        result = result_for(
            spec.to_dict(),
            status=TIMEOUT,
            reason=f"no result within {limit}: raise --timeout or use a smaller size",
        )
    else:
        try:
            return read_result(output)
        except UnreadableResult:
            last_words = _tail(log)
            status, reason = outcome_of_exit(child.returncode, last_words, oom_killed=_oom_kills() > kills_before)
            result = result_for(spec.to_dict(), status=status, reason=reason, details=last_words)
    store.write(spec.file_name, result)
    return result


def _follow(
    child: subprocess.Popen[str], spec: RunSpec, store: ResultStore, limits: Limits, on_progress: ProgressListener
) -> bool:
    """Send the child its request and wait for its end; True if it took too long."""
    request = {
        "spec": spec.to_dict(),
        "output": str(store.path_of(spec.file_name).resolve()),
        "files": str(store.files_of(spec.file_name).resolve()),
        "memory_limit": None if limits.memory is None else int(limits.memory),
    }
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it died already: its exit code tells
    reader = threading.Thread(target=_relay_progress, args=(child.stdout, on_progress), daemon=True)
    reader.start()
    try:
        child.wait(limits.timeout)
    except subprocess.TimeoutExpired:
        return True
    reader.join(timeout=1)
    return False


def _relay_progress(events: IO[str], on_progress: ProgressListener) -> None:
    with events:
        for line in events:
            try:
                event = json.loads(line)
                stage, done, total = event["stage"], event["done"], event["total"]
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # cut short by the child's death, or not the worker's line
            on_progress(stage, done, total)


def _end(child: subprocess.Popen[str]) -> None:
    """Kill every process of the child's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    # Standard output is the reader's to close: here it could wait for a process that left the group and holds it.
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def _oom_kills() -> int:
    """Return how many processes the system has killed for lack of memory since boot; 0 if unknown."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

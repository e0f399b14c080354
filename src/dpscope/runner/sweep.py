"""Sweep over specs, each in a child process whose every ending becomes a result.

`--resume` keeps finished rows that are still valid. The cache of torch.compile is a temporary folder of the sweep. The
time instrument runs first, with an empty cache, so that it measures the compile time of a first run. Other instruments,
and every pass of ncu, use that row's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from dpscope import numbers
from dpscope.endings import outcome_of_exit
from dpscope.errors import UserError
from dpscope.places import number_in
from dpscope.results.identity import MUST_BE_EQUAL
from dpscope.results.schema import Result, UnreadableResult, result_for
from dpscope.results.store import ResultStore, read_result
from dpscope.runner.measure import collect_in_child
from dpscope.runner.spec import RunSpec
from dpscope.units import format_duration
from dpscope.vocabulary.settings import EAGER
from dpscope.vocabulary.statuses import DISK_FULL, TIMEOUT, status_named

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
        reason = f"no result within {limits.in_words}: raise --timeout or use a smaller size"
        result = result_for(spec.to_dict(), status=TIMEOUT, reason=reason)
    else:
        try:
            return read_result(output)
        except UnreadableResult:
            last_words = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
            status, reason = outcome_of_exit(child.returncode, last_words, oom_killed=_oom_kills() > kills_before)
            result = result_for(spec.to_dict(), status=status, reason=reason, details=last_words)
    store.write(spec.file_name, result)
    return result


def _follow(
    child: subprocess.Popen[str], spec: RunSpec, store: ResultStore, limits: Limits, on_progress: ProgressListener
) -> bool:
    """Send the child its request and wait for its end; True if it took too long."""
    places = {"output": store.path_of(spec.file_name), "files": store.files_of(spec.file_name)}
    memory = None if limits.memory is None else int(limits.memory)
    request: dict[str, Any] = {name: str(place.resolve()) for name, place in places.items()}
    request |= {"spec": spec.to_dict(), "memory_limit": memory}
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it died already: its exit code tells
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
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
    return number_in("/proc/vmstat", r"^oom_kill (\d+)") or 0


def still_valid(result: Result, spec: RunSpec, environment: dict[str, Any]) -> bool:
    """Return whether a result has the same spec and environment, and a status that would not change."""
    lasting = spec.device in status_named(result.status).kept_on
    # What kept ncu from counting on this GPU (no ncu, no permission) may have been fixed since.
    lasting &= not (spec.instrument == "ncu" and spec.device == "cuda") or result.ncu.get("source") == "measured"
    same = all(result.environment.get(key) == environment.get(key) for key in MUST_BE_EQUAL)
    return lasting and result.spec == spec.to_dict() and same


def finished_rows(store: ResultStore, specs: Iterable[RunSpec]) -> dict[RunSpec, Result]:
    """Return the rows of `specs` that need not be measured again."""
    found, _ = store.read_all()
    candidates = {spec: found[path] for spec in specs if (path := store.path_of(spec.file_name)) in found}
    if not candidates:
        return {}
    device = next(iter(candidates)).device
    environment = collect_in_child(device)
    return {spec: result for spec, result in candidates.items() if still_valid(result, spec, environment)}


# Environment variables: where Inductor keeps graphs, and Triton kernels below it; its C++ headers are in the second.
CACHE_FOLDER, TEMPORARY = "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"
Environment = dict[str, str]


@contextmanager
def compile_caches(specs: Sequence[RunSpec]) -> Iterator[Callable[[RunSpec], Environment]]:
    """Give a function that returns the variables for the environment of a spec's child."""
    if all(spec.compile == EAGER for spec in specs):
        yield lambda spec: {}
        return
    with tempfile.TemporaryDirectory(prefix="dpscope-compiled-", ignore_cleanup_errors=True) as folder:

        def environment_of(spec: RunSpec) -> Environment:
            if spec.compile == EAGER:
                return {}
            of_the_row = Path(folder) / replace(spec, instrument="time", options={}).digest  # for all its instruments
            of_the_row.mkdir(exist_ok=True)
            return {CACHE_FOLDER: str(of_the_row / "inductor"), TEMPORARY: str(of_the_row)}

        yield environment_of


class SweepObserver:
    """Observer of a sweep; this one does nothing. Row numbers count from 0."""

    def row_started(self, row: int, spec: RunSpec) -> None: ...

    def row_progress(self, row: int, stage: str, done: int, total: int) -> None: ...

    def row_finished(self, row: int, result: Result, *, kept: bool) -> None: ...


def open_store(store: ResultStore, *, resume: bool, overwrite: bool) -> None:
    """Make the output folder ready, refusing to mix two sweeps by accident."""
    if resume and overwrite:
        raise UserError("--resume keeps finished rows and --overwrite removes them: give one of the two")
    if store.folder.exists() and not store.folder.is_dir():
        raise UserError(f"{store.folder} is a file, not a folder: choose another --out")
    if store.holds_results() and not (resume or overwrite):
        raise UserError(
            f"{store.folder} already holds results: add --resume to finish that sweep, --overwrite to replace "
            "it, or choose another --out"
        )
    if store.summary.exists() and not store.results.is_dir():
        raise UserError(f"{store.summary} is there already and is not dpscope's: choose another --out")
    store.create()
    if overwrite:
        with store.locked():  # a sweep that is still running keeps what it has finished
            store.remove_results()


def run_sweep(
    specs: Sequence[RunSpec], store: ResultStore, *, resume: bool, limits: Limits, observer: SweepObserver
) -> list[Result]:
    """Measure every spec; results come in the order of `specs`. An interruption does not lose finished rows."""
    with store.locked(), compile_caches(specs) as environment_of:
        finished = finished_rows(store, specs) if resume else {}
        results = []
        for row, spec in enumerate(specs):
            if (result := finished.get(spec)) is None:
                observer.row_started(row, spec)
                tell = partial(observer.row_progress, row)
                result = launch(spec, store, limits=limits, on_progress=tell, environment=environment_of(spec))
            observer.row_finished(row, result, kept=spec in finished)
            results.append(result)
        return results

"""Sweep over specs, each in a child process; `--resume` keeps finished rows that are still valid.

The cache of torch.compile is a temporary folder of the sweep. The time instrument runs first, with an empty cache, so
that it measures the compile time of a first run. Other instruments, and every pass of ncu, use that row's cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore
from dpscope.runner.environment import collect_in_child, same_environment
from dpscope.runner.launcher import Limits, launch
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.settings import EAGER
from dpscope.vocabulary.statuses import status_named


def still_valid(result: Result, spec: RunSpec, environment: dict[str, Any]) -> bool:
    """Return whether a result has the same spec and environment, and a status that would not change."""
    lasting = spec.device in status_named(result.status).kept_on
    # What kept ncu from counting on this GPU (no ncu, no permission) may have been fixed since.
    lasting &= not (spec.instrument == "ncu" and spec.device == "cuda") or result.ncu.get("source") == "measured"
    return lasting and result.spec == spec.to_dict() and same_environment(result.environment, environment)


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
        yield partial(_environment, Path(folder))


def _environment(folder: Path, spec: RunSpec) -> Environment:
    if spec.compile == EAGER:
        return {}
    of_the_row = folder / replace(spec, instrument="time", options={}).digest  # the same for all its instruments
    of_the_row.mkdir(exist_ok=True)
    return {CACHE_FOLDER: str(of_the_row / "inductor"), TEMPORARY: str(of_the_row)}


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
            kept = finished.get(spec)
            if kept is None:
                observer.row_started(row, spec)

                def on_progress(stage: str, done: int, total: int, row: int = row) -> None:
                    observer.row_progress(row, stage, done, total)

                result = launch(spec, store, limits=limits, on_progress=on_progress, environment=environment_of(spec))
            else:
                result = kept
            observer.row_finished(row, result, kept=kept is not None)
            results.append(result)
        return results

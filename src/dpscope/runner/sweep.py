"""Sweep over specs: one measurement after another, each in a child process."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.errors import UserError
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore
from dpscope.runner.compile_cache import compile_caches
from dpscope.runner.launcher import Limits, launch
from dpscope.runner.resume import finished_rows
from dpscope.runner.spec import RunSpec


class SweepObserver:
    """Who watches a sweep; this one does nothing. Row numbers count from 0."""

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
    """Measure every spec; results in the order of `specs`. Finished rows outlive any interruption."""
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

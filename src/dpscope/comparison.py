"""The main job as a Python function: many measurements in, one comparison out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpscope.reports.outputs import write_reports
from dpscope.reports.tables import Row, compare_results
from dpscope.reports.text import render_plain, summary
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore, Skipped
from dpscope.runner.launcher import Limits
from dpscope.runner.preflight import require_measurable
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import SilentObserver, SweepObserver, open_store, run_sweep


@dataclass(frozen=True)
class Comparison:
    """Results side by side, with `standard` as the denominator. `print(comparison)` shows the table."""

    results: list[Result]
    folder: Path
    files: list[Path]
    skipped: list[Skipped]  # files among the results that are none

    @property
    def rows(self) -> list[Row]:
        return compare_results(self.results)

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def __str__(self) -> str:
        return render_plain(summary(self.results, self.skipped))


def compare(
    specs: Sequence[RunSpec],
    *,
    out: Path | str,
    resume: bool = False,
    overwrite: bool = False,
    limits: Limits | None = None,
    observer: SweepObserver | None = None,
) -> Comparison:
    """Measure every spec in a process of its own and write results and `summary.txt` to `out`.

    >>> from dpscope import compare, make_config, make_sweep
    >>> specs = make_sweep(make_config("tiny"), methods=["standard", "ghost"], batch_sizes=[4], seq_lens=[64])
    >>> print(compare(specs, out="results"))                                            # doctest: +SKIP
    """
    require_measurable(specs)
    store = ResultStore(Path(out))
    open_store(store, resume=resume, overwrite=overwrite)
    _, skipped = store.read_all()
    results = run_sweep(specs, store, resume=resume, limits=limits or Limits(), observer=observer or SilentObserver())
    files = [
        *write_reports(results, store.folder, skipped=skipped),
        *(store.path_of(spec.file_name) for spec in specs),
        *(store.folder / name for result in results for name in result.files.values()),
    ]
    return Comparison(results, store.folder, files, skipped)

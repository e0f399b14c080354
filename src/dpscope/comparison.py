"""The main job as a Python function: many measurements in, one comparison out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpscope.errors import UserError
from dpscope.reports import export
from dpscope.reports.latex import to_latex
from dpscope.reports.outputs import remove_reports, write_reports
from dpscope.reports.tables import Row, compare_results
from dpscope.reports.text import render_plain, summary
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore, Skipped
from dpscope.runner.launcher import Limits
from dpscope.runner.preflight import require_measurable
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import SilentObserver, SweepObserver, open_store, run_sweep
from dpscope.trainers.registry import methods, resolve_method

if TYPE_CHECKING:
    import pandas


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

    @classmethod
    def read(cls, folder: Path | str) -> Comparison:
        """The results that are in a folder, without measuring; files that are none are in `skipped`."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give the --out folder of a `dpscope compare`")
        found, skipped = ResultStore(folder).read_all()
        if not found:
            reasons = "".join(f"\n  {item.path.name}: {item.reason}" for item in skipped)
            raise UserError(f"no dpscope results in {folder}{reasons}")
        results = sorted(map(_with_its_own_name, found.values()), key=_order)
        return cls(results, folder, list(found), skipped)

    def to_pandas(self) -> pandas.DataFrame:
        """A record for each method at each size; units are in the columns' names."""
        return export.to_pandas(self.rows)

    def to_csv(self, path: Path | str) -> None:
        export.write_frame(self.to_pandas(), Path(path))

    def to_latex(self) -> str:
        """Tables for a paper that uses booktabs: time and peak memory, and components where they were measured."""
        return to_latex(self.rows)

    def __str__(self) -> str:
        return render_plain(summary(self.results, self.skipped))


def _with_its_own_name(result: Result) -> Result:
    """Files of older scripts call a method by an alias."""
    try:
        return replace(result, experiment=resolve_method(result.experiment).name)
    except UserError:
        return result  # a method of a package that is not installed here


def _order(result: Result) -> tuple[object, ...]:
    names = list(methods())
    place = names.index(result.experiment) if result.experiment in names else len(names)
    spec = result.spec
    return (spec["workload"]["name"], spec["dtype"], spec["batch_size"], spec.get("seq_len") or 0, place)


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
    if overwrite:
        remove_reports(store.folder)
    _, skipped = store.read_all()
    results = run_sweep(specs, store, resume=resume, limits=limits or Limits(), observer=observer or SilentObserver())
    files = [
        *write_reports(results, store.folder, skipped=skipped),
        *(store.path_of(spec.file_name) for spec in specs),
        *(store.folder / name for result in results for name in result.files.values()),
    ]
    return Comparison(results, store.folder, files, skipped)

"""`dpscope.compare`: measure methods and compare them, from Python."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpscope.errors import UserError
from dpscope.packages import MEASURING, require
from dpscope.plain_text import SUMMARY_WIDTH, render_plain
from dpscope.reports import export
from dpscope.reports.against.data import Against, set_against
from dpscope.reports.export import to_latex
from dpscope.reports.findings import list_findings
from dpscope.reports.outputs import remove_reports, write_reports
from dpscope.reports.report import Report
from dpscope.reports.tables import Row
from dpscope.reports.text import summary
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore, Skipped, new_folder, write_atomically
from dpscope.runner.planning import plan_sweep, require_measurable
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import Limits, SweepObserver, open_store, run_sweep
from dpscope.runner.worker import refuse_in_child
from dpscope.vocabulary.methods import methods, resolve_method
from dpscope.workloads.configs import WorkloadConfig

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results side by side, relative to `standard`. `print(comparison)` shows the table.

    Args:
        results: The results, one for each method, size and instrument.
        folder: The folder that holds them.
        files: The files they were read from.
        skipped: Files in the folder that are no results, with the reason.

    Example:
        >>> comparison = dpscope.Comparison.read(folder)
        >>> print(comparison.to_pandas()[["method", "time_ratio", "memory_ratio"]])
    """

    results: list[Result]
    folder: Path
    files: list[Path]
    skipped: list[Skipped]  # files among the results that are none

    @cached_property
    def report(self) -> Report:
        return Report.of(self.results, self.skipped, folder=self.folder)

    @property
    def rows(self) -> list[Row]:
        """Rows of the table, one for each method at each size, with the figures of all instruments."""
        return self.report.rows

    @property
    def ok(self) -> bool:
        """True if everything was measured, so no row failed, was skipped or ran out of memory."""
        return all(result.ok for result in self.results)

    @classmethod
    def read(cls, folder: Path | str) -> Comparison:
        """Read the results in a folder, without measuring.

        Args:
            folder: The `--out` folder of a measuring command.

        Returns:
            The comparison. Files that are no results are in its `skipped`.

        Raises:
            UserError: The folder does not exist, or holds no results.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give the --out folder of a `dpscope compare`")
        found, skipped = ResultStore(folder).read_all()
        if not found:
            reasons = "".join(f"\n  {item.path.name}: {item.reason}" for item in skipped)
            raise UserError(f"no dpscope results in {folder}{reasons}")
        names = list(methods())

        def order(result: Result) -> tuple[object, ...]:
            place = names.index(result.experiment) if result.experiment in names else len(names)
            spec = result.spec
            return (spec["workload"]["name"], spec["dtype"], spec["batch_size"], spec.get("seq_len") or 0, place)

        return cls(sorted(map(_with_its_own_name, found.values()), key=order), folder, list(found), skipped)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with a record for each method at each size; columns name their units."""
        return export.to_pandas(self.rows)

    def to_csv(self, path: Path | str) -> None:
        """Write the records of `to_pandas()` to the file `path`."""
        write_atomically(Path(path), export.frame_to_csv(self.to_pandas()))

    def to_latex(self) -> str:
        """Return LaTeX tables (booktabs) of time and peak memory, and of components if they were measured."""
        return to_latex(self.rows)

    def against(self, before: Comparison | Path | str) -> Against:
        """Return what changed since `before`, an earlier comparison or its folder: `print` it, or use `to_pandas()`."""
        other = before if isinstance(before, Comparison) else Comparison.read(before)
        older = Report.of(other.results, other.skipped, folder=self.folder)
        return set_against(self.report, older, names=(str(self.folder), str(other.folder)))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data; docs/schemas/compare.json describes it."""
        return {
            "document": "dpscope.compare",
            "version": 1,
            "ok": self.ok,
            "folder": str(self.folder),
            "rows": export.to_records(self.rows),
            "findings": [asdict(finding) for finding in list_findings(self.report)],
            "left_out": [{"file": str(item.path), "reason": item.reason} for item in self.skipped],
        }

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.rows)} rows in {self.folder}: print it, or take to_pandas()>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook, with its conclusions below."""
        columns = [*export.IDENTITY, "status", "time_median_ms", "time_ratio", "peak_memory_bytes", "memory_ratio"]
        frame = self.to_pandas()
        frame = frame[[name for name in columns if name in frame]]
        table: str = frame.to_html(index=False, na_rep="—", float_format="{:.3g}".format)
        said = [f"{finding.statement} ({finding.size})." for finding in list_findings(self.report)]
        return table + "".join(f"<p>{html.escape(sentence)}</p>" for sentence in said)

    def summary(self, width: int = SUMMARY_WIDTH) -> RenderableType:
        """Return the table and its conclusions, for a console of `width` columns."""
        return summary(self.report, width=width)

    def __str__(self) -> str:
        return render_plain(self.summary())


def _with_its_own_name(result: Result) -> Result:
    """Replace a method's alias, as files of older scripts have it, by its name."""
    try:
        return replace(result, experiment=resolve_method(result.experiment).name)
    except UserError:
        return result  # a method of a package that is not installed here


def compare(
    workload: WorkloadConfig | str | Callable[..., Any] | Sequence[RunSpec],
    *,
    out: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    limits: Limits | None = None,
    observer: SweepObserver | None = None,
    **sweep: Any,
) -> Comparison:
    """Measure every method at every size, each in a process of its own.

    Args:
        workload: A preset ("tiny", "hf:gpt2"), a config (`make_config`), "FILE.py:function", or a function at the top
            level of a file that returns a `Workload`. Or a list of run specs.
        out: The folder for results and reports; by default a new one below `dpscope-results`.
        resume: Keep finished rows of the folder.
        overwrite: Remove earlier results and reports of the folder first.
        limits: Time and memory that a row may take.
        observer: Object whose methods are called with each spec that starts and each result.
        **sweep: `methods`, `batch_size`, `seq_len` (each a value or a list), `instruments` (names, or "all"), `device`,
            `options` (instrument -> option -> value), and any setting of a row: `dtype`, `compile`, `steps`, …

    Returns:
        The comparison. It is written to `out` as `summary.txt`, `report.html` and more.

    Raises:
        UserError: The workload or a setting is wrong, or the folder holds other results.

    Example:
        >>> import dpscope
        >>> print(dpscope.compare("tiny", methods=["standard", "ghost"], batch_size=[4], seq_len=64))  # doctest: +SKIP
    """
    refuse_in_child()
    require(*MEASURING)
    specs = specs_of(workload, sweep)
    limits = limits or Limits()
    require_measurable(specs, limits)
    store = ResultStore(new_folder("compare") if out is None else Path(out))
    open_store(store, resume=resume, overwrite=overwrite)
    if overwrite:
        remove_reports(store.folder)
    _, skipped = store.read_all()
    results = run_sweep(specs, store, resume=resume, limits=limits, observer=observer or SweepObserver())
    comparison = Comparison(results, store.folder, [], skipped)
    comparison.files[:] = [
        *write_reports(comparison.report, store.folder),
        *(store.path_of(spec.file_name) for spec in specs),
        *(store.folder / name for result in results for name in result.files.values()),
    ]
    return comparison


def specs_of(workload: Any, sweep: dict[str, Any]) -> list[RunSpec]:
    """Return the run specs that `compare` measures."""
    if isinstance(workload, list | tuple):
        if sweep:
            raise UserError(
                f"run specs say everything already: leave out {', '.join(sweep)}, or give a workload instead"
            )
        return list(workload)
    plan = plan_sweep(workload, **sweep)
    for remark in plan.remarks:
        warnings.warn(remark, stacklevel=3)
    return plan.specs

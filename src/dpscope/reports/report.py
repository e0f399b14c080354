"""What reports say of some results, computed once and handed to text, page, figures and exports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dpscope.paths import path_from
from dpscope.reports.settings import Setting, Size, group_by_setting
from dpscope.reports.story import Story, tell
from dpscope.reports.tables import Row, compare_results, seen_once
from dpscope.results.schema import Result
from dpscope.results.store import Skipped

_IN_TRACEBACK = re.compile(r'(?<=File ")[^"\n]+(?=", line )')


def with_paths_from(folder: Path, result: Result) -> Result:
    """The same result with paths as they are found from a folder: of the workload's file, and in tracebacks."""
    workload = result.spec["workload"]
    if isinstance(file := workload.get("file"), str):
        workload = {**workload, "file": path_from(folder, file)}
        result = replace(result, spec={**result.spec, "workload": workload})
    if isinstance(result.details, str):
        told = _IN_TRACEBACK.sub(lambda found: path_from(folder, found[0]), result.details)
        result = replace(result, details=told)
    return result


@dataclass(frozen=True, eq=False)
class Report:
    results: tuple[Result, ...]
    skipped: tuple[Skipped, ...] = ()  # files among the results that are none
    folder: Path | None = None  # where it will lie: paths are told from there

    @classmethod
    def of(cls, results: Iterable[Result], skipped: Iterable[Skipped] = (), *, folder: Path | None = None) -> Report:
        found = tuple(result if folder is None else with_paths_from(folder, result) for result in results)
        return cls(found, tuple(skipped), folder)

    @cached_property
    def rows(self) -> list[Row]:
        return compare_results(self.results)

    @cached_property
    def settings(self) -> list[Setting]:
        return group_by_setting(self.rows)

    @cached_property
    def sizes(self) -> list[Size]:
        return [size for setting in self.settings for size in setting.sizes]

    @cached_property
    def stories(self) -> list[Story]:
        """One for each of `sizes`."""
        return [tell(size.rows) for size in self.sizes]

    def rows_of(self, instrument: str) -> list[Row]:
        """Rows without those that would tell again what the instrument saw of an earlier one; "": every row."""
        return seen_once(self.rows, instrument)

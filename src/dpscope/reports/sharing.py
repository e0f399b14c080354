"""Results as reports show them: reports are sent around, result files stay where they were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dpscope.paths import path_from
from dpscope.results.schema import Result


def with_paths_from(folder: Path, results: Iterable[Result]) -> list[Result]:
    """The same results with the files of workloads as they are found from a folder, where commands will be typed."""
    return [_with_path(folder, result) for result in results]


def _with_path(folder: Path, result: Result) -> Result:
    workload = result.spec["workload"]
    if not isinstance(file := workload.get("file"), str):
        return result
    return replace(result, spec={**result.spec, "workload": {**workload, "file": path_from(folder, file)}})

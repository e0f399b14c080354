"""Results as reports show them: reports are sent around, result files stay where they were measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dpscope.paths import path_from
from dpscope.results.schema import Result

_IN_TRACEBACK = re.compile(r'(?<=File ")[^"\n]+(?=", line )')


def with_paths_from(folder: Path, results: Iterable[Result]) -> list[Result]:
    """The same results with paths as they are found from a folder: of workloads' files, and in tracebacks."""
    return [_with_paths(folder, result) for result in results]


def _with_paths(folder: Path, result: Result) -> Result:
    workload = result.spec["workload"]
    if isinstance(file := workload.get("file"), str):
        workload = {**workload, "file": path_from(folder, file)}
        result = replace(result, spec={**result.spec, "workload": workload})
    if isinstance(result.details, str):
        told = _IN_TRACEBACK.sub(lambda found: path_from(folder, found[0]), result.details)
        result = replace(result, details=told)
    return result

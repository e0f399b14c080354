"""`dpscope` with its rows measured in this very process: for tests of what a command prints, writes and returns.

A child imports torch for seconds to measure for milliseconds. That every row has a process of its own, and that
children measure, fail and die as they should, is tested with real ones: `commands/test_compare.py`, `runner/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner, Result

from dpscope.cli import main
from dpscope.results import schema
from dpscope.results.store import ResultStore
from dpscope.runner.spec import RunSpec


def run(*arguments: str | Path) -> Result:
    with mock.patch("dpscope.runner.sweep.launch", launch_here):
        return CliRunner().invoke(main, [str(part) for part in arguments])


def launch_here(spec: RunSpec, store: ResultStore, *, on_progress: Any, **_: Any) -> schema.Result:
    from dpscope.runner.measure import measure_or_explain

    store.make_way(spec.file_name)
    result = measure_or_explain(spec, on_progress, store.files_of(spec.file_name).resolve())
    store.write(spec.file_name, result)
    return result

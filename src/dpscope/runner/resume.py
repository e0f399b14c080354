"""Rows that `--resume` keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dpscope.results.schema import Result
from dpscope.results.store import ResultStore
from dpscope.runner.environment import collect_in_child, same_environment
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.statuses import status_named


def still_valid(result: Result, spec: RunSpec, environment: dict[str, Any]) -> bool:
    """Tell if it is the same spec and environment, with a status that would come out the same again."""
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

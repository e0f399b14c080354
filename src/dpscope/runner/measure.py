"""Measurement of a run spec in the current process, with the function of its instrument in measurements/."""

from __future__ import annotations

import importlib
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from dpscope.errors import MeasurementFailed, UserError
from dpscope.instruments.timing import Progress, no_progress
from dpscope.outcomes import outcome_of_exception
from dpscope.results.schema import Result, result_for
from dpscope.results.store import NO_ROOM
from dpscope.runner import environment
from dpscope.runner.spec import RunSpec
from dpscope.runner.tracebacks import details_of
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.statuses import FAILED

# (spec, progress, folder for what the measurement leaves beside its figures) -> result
Measurement = Callable[[RunSpec, Progress, Path], Result]


def measurement_module(instrument: str) -> ModuleType:
    """Return the module with an instrument's `measure_NAME`.

    It has `obstacle(device)` if the instrument cannot work everywhere, and `measure_rank(spec, folder)` if it can
    measure rows of several processes.
    """
    return importlib.import_module(f"dpscope.runner.measurements.{instrument}")


def measure(spec: RunSpec, progress: Progress = no_progress, files: Path | None = None) -> Result:
    """Measure a spec. Files that the measurement writes go to `files`; without it they are deleted."""
    module = measurement_module(spec.instrument)
    if spec.world_size > 1 and not INSTRUMENTS[spec.instrument].of_ranks:
        raise UserError(
            f"{spec.instrument} looks at one process: of several, --instruments time gives time and peak of every "
            "rank, and trace where their time goes"
        )
    measurement: Measurement = getattr(module, f"measure_{spec.instrument}")
    with tempfile.TemporaryDirectory() as nowhere:
        folder = files or Path(nowhere)
        result = replace(measurement(spec, progress, folder), environment=environment.collect(spec.device))
        if files is None:
            return replace(result, files={})
    # A result names its files from the sweep's folder, so that the whole can be moved.
    return replace(result, files={what: f"{folder.parent.name}/{folder.name}/{n}" for what, n in result.files.items()})


def measure_or_explain(spec: RunSpec, progress: Progress = no_progress, files: Path | None = None) -> Result:
    """Measure a spec, or return a result that says why that failed. The traceback goes to standard error."""
    try:
        return measure(spec, progress, files)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise  # not of this row: the next could not be written either
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        explained = isinstance(error, MeasurementFailed)  # by its reason; its traceback is ours
        details = details_of(error, spec.workload) if status == FAILED and not explained else None
    # Outside the handler, so that the frames holding the memory that ran out are gone.
    where = environment.collect(spec.device)
    return result_for(spec.to_dict(), status=status, reason=reason, details=details, environment=where)

"""Measurement of a run spec in the current process, and the environment it is measured in.

The function of an instrument is in measurements/. This module also finds the instruments that can work on this machine,
and formats tracebacks of the user's code without frames of dpscope. `python -m dpscope.runner.measure DEVICE` prints
the environment as JSON. The parent of a sweep asks a child for it, so that the parent never opens a CUDA context.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dpscope.endings import outcome_of_exception
from dpscope.errors import MeasurementFailed, UserError
from dpscope.instruments.timing import Progress, no_progress
from dpscope.packages import version_of
from dpscope.places import is_own_source
from dpscope.results.identity import LIBRARIES
from dpscope.results.schema import Result, result_for
from dpscope.results.store import NO_ROOM
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.settings import DEVICE_CHOICES, OneOf
from dpscope.vocabulary.statuses import FAILED
from dpscope.vocabulary.version import __version__
from dpscope.workloads.configs import CustomConfig, WorkloadConfig

_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def their_mistake(error: BaseException, workload: WorkloadConfig) -> str | None:
    """Return the error in the user's workload; None if the fault was elsewhere."""
    if isinstance(error, SystemExit):  # its exit code would be taken for ours
        return f"{workload.name} ended Python (SystemExit {error.code}) where it should have returned"
    own = own_traceback(error, workload)
    return None if own is None else f"{workload.name} failed:\n{own.rstrip()}"


def own_traceback(error: BaseException, workload: WorkloadConfig) -> str | None:
    """Format an error starting at the user's first frame; None if no frame is the user's."""
    if not isinstance(workload, CustomConfig):
        return None
    if isinstance(error, SyntaxError) and error.filename == workload.file:  # their code, though none of it ran
        return "".join(traceback.format_exception_only(error))
    frames = traceback.extract_tb(error.__traceback__)
    first = next((at for at, frame in enumerate(frames) if _is_theirs(frame.filename, workload)), None)
    if first is None:
        return None
    theirs = [frame for frame in frames[first:] if not _is_ours(frame.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
    return "".join([*lines, *traceback.format_exception_only(error)])


def _is_theirs(file: str, workload: CustomConfig) -> bool:
    if file == workload.file:
        return True
    return not (_is_ours(file) or file.startswith((*_INSTALLED, "<")))


def _is_ours(file: str) -> bool:
    return is_own_source(file) or file.startswith("<frozen importlib")


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
        result = replace(measurement(spec, progress, folder), environment=collect(spec.device))
        if files is None:
            return replace(result, files={})
    # A result names its files from the sweep's folder, so that the whole can be moved.
    return replace(result, files={what: f"{folder.parent.name}/{folder.name}/{n}" for what, n in result.files.items()})


def measure_or_explain(spec: RunSpec, progress: Progress = no_progress, files: Path | None = None) -> Result:
    """Measure a spec, or return a result with the reason for the failure. The traceback goes to standard error."""
    try:
        return measure(spec, progress, files)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise  # not of this row: the next could not be written either
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
        explained = isinstance(error, MeasurementFailed)  # by its reason; its traceback is ours
        details = None
        if status == FAILED and not explained:
            details = own_traceback(error, spec.workload) or "".join(traceback.format_exception(error))
    # Outside the handler, so that the frames holding the memory that ran out are gone.
    where = collect(spec.device)
    return result_for(spec.to_dict(), status=status, reason=reason, details=details, environment=where)


ALL = "all"


@dataclass(frozen=True)
class Choice:
    """Instruments, and a sentence for each that is left out or limited."""

    instruments: tuple[str, ...]
    remarks: list[str] = field(default_factory=list)
    named: bool = True  # one by one; not as "all"


def choose_instruments(asked: str | Iterable[str], device: str) -> Choice:
    """Return the instruments of a sweep: the requested names, or `all` that can work here."""
    names = [name.strip() for name in asked.split(",")] if isinstance(asked, str) else list(asked)
    if ALL not in names:
        return Choice(tuple(names))
    obstacles = {
        name: None if each.works_everywhere else measurement_module(name).obstacle(device)
        for name, each in INSTRUMENTS.items()
    }
    left_out = {name for name, why in obstacles.items() if why and not INSTRUMENTS[name].instead}
    remarks = [
        f"{name} is left out: {why}" if name in left_out else f"{name}: {INSTRUMENTS[name].instead}: {why}"
        for name, why in obstacles.items()
        if why
    ]
    return Choice(tuple(name for name in INSTRUMENTS if name not in left_out), remarks, named=False)


def collect(device: str) -> dict[str, Any]:
    """Return versions and hardware; open a CUDA context only if the measurement uses one."""
    import torch

    checkout = Path(__file__).parents[3]  # of dpscope's sources; not there for an installed package
    describe = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    environment: dict[str, Any] = {
        "dpscope": __version__,
        "git_commit": _first_line(*describe) if (checkout / ".git").exists() else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        **{name: version_of(name) for name in LIBRARIES},
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": None,
        "driver": None,
        "gpu": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        environment |= {
            "cuda": torch.version.cuda,
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
    return environment


def collect_in_child(device: str) -> dict[str, Any]:
    """Run `collect` in a child process."""
    command = [sys.executable, "-m", "dpscope.runner.measure", device]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    environment: dict[str, Any] = json.loads(output.splitlines()[-1])
    return environment


def resolve_device(device: str) -> str:
    """Return cpu or cuda; `auto` is cuda where torch sees a GPU. Raise `UserError` if the device is not there."""
    if OneOf("device", DEVICE_CHOICES)(device) == "cpu":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise UserError("--device cuda, but torch sees no CUDA device here: run `dpscope doctor`, or use --device cpu")
    return "cpu"


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name[^:]*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _first_line(*command: str) -> str | None:
    """Return the first line that a command prints; None if it cannot be run, or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    print(json.dumps(collect(sys.argv[1])))

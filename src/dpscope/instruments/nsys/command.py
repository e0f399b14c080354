"""The command lines of nsys, and the few variables that the program it looks at may see."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpscope.instruments.nsys.finding import Nsys
from dpscope.vocabulary.instruments import INSTRUMENTS

TRACED_APIS: str = INSTRUMENTS["nsys"].options["trace"].default

# nsys writes the whole environment of the profiled process into its report, and reports are shared. These are what a
# training step can need, by what for; everything else stays out.
PASSED_VARIABLES = {
    "programs and libraries": ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    "compiling kernels": ("CC", "CXX", "CPATH", "LIBRARY_PATH"),
    "folders": ("HOME", "TMPDIR", "XDG_CACHE_HOME"),
    "language": ("LANG", "LANGUAGE", "TZ"),
    "which GPU": ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    "arithmetic": ("NVIDIA_TF32_OVERRIDE", "OPENBLAS_NUM_THREADS"),
    "Hugging Face": ("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
}
# Settings of the libraries that compute: a step is to be the same with and without nsys.
PASSED_PREFIXES = ("CUDA_", "CUBLAS", "CUDNN_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_", "LC_")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NsysOptions:
    """Options of a recording by nsys."""

    trace: str = TRACED_APIS
    cpu_sampling: bool = False  # where host threads are, by interrupts: needs permission, slows the host
    gpu_metrics: bool = False  # utilisation of the GPU's units over time: needs permission for counters


def needed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the profiled program gets: those listed above, and none that sounds secret."""
    known = {name for names in PASSED_VARIABLES.values() for name in names}
    return {
        name: value
        for name, value in environment.items()
        if (name in known or name.startswith(PASSED_PREFIXES)) and not SECRET.search(name)
    }


def profile_command(nsys: Nsys, program: Sequence[str], report: Path, looking: NsysOptions) -> list[str]:
    """Record what runs between `cudaProfilerStart` and `cudaProfilerStop`, and nothing before or after it.

    `report` has no suffix; nsys adds `.nsys-rep`.
    """
    # Not `stop-shutdown`, the default, which may end the program before it has said how it went.
    end = ["--capture-range-end=stop"] if nsys.knows("--capture-range-end") else ["--stop-on-range-end=true"]
    scope = ["--capture-range=cudaProfilerApi", *end]
    where = ["--force-overwrite=true", f"--output={report}"]
    return [nsys.path, "profile", f"--trace={looking.trace}", *_sampling(nsys, looking), *scope, *where, *program]


def export_command(nsys: str, report: Path, database: Path) -> list[str]:
    return [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]


def import_raw_command(importer: str, raw: Path, report: Path) -> list[str]:
    return [importer, "-i", str(raw), "-o", str(report)]


def interactive_commands(
    nsys: Nsys, program: Sequence[str], looking: NsysOptions, *, session: str, environment: Mapping[str, str]
) -> list[str]:
    """Start a program now, and start and stop recording by hand, as often as one likes; one shell line each."""
    launch = [nsys.path, "launch", f"--session-new={session}", f"--trace={looking.trace}", *program]
    # %h is the host's name: on storage that several machines share, each then writes a file of its own.
    start = [nsys.path, "start", f"--session={session}", *_sampling(nsys, looking), f"--output={session}-%h"]
    stop = [nsys.path, "stop", f"--session={session}"]
    return [shell_line(launch, environment), shlex.join(start), shlex.join(stop)]


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a command as one types it, with the environment it would get and no other."""
    variables = [f"{name}={value}" for name, value in sorted(environment.items())]
    return shlex.join(["env", "-i", *variables, *command])


def _sampling(nsys: Nsys, looking: NsysOptions) -> list[str]:
    host = "process-tree" if looking.cpu_sampling else "none"
    options = [f"--sample={host}", f"--cpuctxsw={host}"]
    if looking.gpu_metrics:
        spelled = "--gpu-metrics-devices" if nsys.knows("--gpu-metrics-devices") else "--gpu-metrics-device"
        options.append(f"{spelled}=all")
    return options

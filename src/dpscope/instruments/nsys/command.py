"""Location of nsys, its version's features, its command lines, and the variables that the program may see."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpscope.instruments.ncu.running import find_ncu
from dpscope.instruments.processes import ask, find_version, newest
from dpscope.vocabulary.instruments import INSTRUMENTS

# Where installers put it when it is not on the PATH. Nsight Compute brings an nsys of its own.
NSYS_PATTERNS = (
    "opt/nvidia/nsight-systems/*/bin/nsys",
    "opt/nvidia/nsight-systems/*/target-linux-*/nsys",
    "opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/local/cuda*/nsight-systems*/bin/nsys",
    "usr/local/cuda*/nsight-systems*/target-linux-*/nsys",
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
    "usr/lib/nsight-compute*/host/target-linux-*/nsys",
    "usr/lib/*/nsight-compute*/host/target-linux-*/nsys",
)
BESIDE_NCU = ("host/target-linux-*/nsys", "nsight-compute*/host/target-linux-*/nsys")
IMPORTER = "QdstrmImporter"
# Seen from the folder that nsys lies in, then where distributions put it.
_BESIDE = (".", "../host-linux-*", "../linux-desktop-*", "../host/linux-desktop-*", "../../host-linux-*")
IMPORTER_BESIDE = tuple(f"{folder}/{IMPORTER}" for folder in _BESIDE)
IMPORTER_INSTALLED = tuple(
    f"{folder}/{IMPORTER}"
    for folder in ("usr/lib/nsight-systems/host-linux-*", "opt/nvidia/nsight-systems/*/host-linux-*")
)


@dataclass(frozen=True)
class Nsys:
    """An nsys executable, its version, and the long options that `nsys profile` of it knows."""

    path: str
    version: str | None
    options: frozenset[str]

    def knows(self, option: str) -> bool:
        """Return whether this version has the option; True if its help could not be read."""
        return not self.options or option in self.options


def find_nsys() -> str | None:
    """Return $NSYS, or `nsys` on the PATH, or beside ncu, or the newest in the usual folders."""
    if asked := os.environ.get("NSYS"):
        return shutil.which(asked)
    if on_path := shutil.which("nsys"):
        return on_path
    ncu = find_ncu()  # which, or a script that calls it, lies in its installation or below
    return (ncu and newest(BESIDE_NCU, Path(ncu).resolve().parents[:3])) or newest(NSYS_PATTERNS)


def inspect_nsys(path: str) -> Nsys:
    """Ask nsys for its version and its options."""
    options = re.findall(r"--[a-z][a-z0-9-]*", ask(path, "profile", "--help"))
    return Nsys(path, find_version(ask(path, "--version"), numbers=4), frozenset(options))


def find_importer(nsys: str) -> str | None:
    """Return the program that turns a `.qdstrm` into a `.nsys-rep`, of the same installation or of another."""
    if beside := newest(IMPORTER_BESIDE, [Path(nsys).resolve().parent]):
        return str(Path(beside).resolve())
    return shutil.which(IMPORTER) or newest(IMPORTER_INSTALLED)


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


def interactive_commands(
    nsys: Nsys, program: Sequence[str], looking: NsysOptions, *, session: str, environment: Mapping[str, str]
) -> list[str]:
    """Return shell lines that start a program, and start and stop recording by hand, any number of times."""
    launch = [nsys.path, "launch", f"--session-new={session}", f"--trace={looking.trace}", *program]
    # %h is the host's name: on storage that several machines share, each then writes a file of its own.
    start = [nsys.path, "start", f"--session={session}", *_sampling(nsys, looking), f"--output={session}-%h"]
    stop = [nsys.path, "stop", f"--session={session}"]
    return [shell_line(launch, environment), shlex.join(start), shlex.join(stop)]


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a command as it is typed in a shell, with only the environment it would get."""
    variables = [f"{name}={value}" for name, value in sorted(environment.items())]
    return shlex.join(["env", "-i", *variables, *command])


def _sampling(nsys: Nsys, looking: NsysOptions) -> list[str]:
    host = "process-tree" if looking.cpu_sampling else "none"
    options = [f"--sample={host}", f"--cpuctxsw={host}"]
    if looking.gpu_metrics:
        spelled = "--gpu-metrics-devices" if nsys.knows("--gpu-metrics-devices") else "--gpu-metrics-device"
        options.append(f"{spelled}=all")
    return options

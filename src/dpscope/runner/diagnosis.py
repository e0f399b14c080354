"""Diagnosis of this machine: what works, what does not, and how to fix it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpscope.instruments.ncu.running import NO_NCU, find_ncu, ncu_version, try_counters
from dpscope.instruments.nsys.command import find_importer, find_nsys, inspect_nsys
from dpscope.instruments.nsys.running import NO_NSYS, missing_library, sampling_refused
from dpscope.instruments.processes import ask
from dpscope.packages import install_command, release_of, version_of
from dpscope.units import GIB

PRESENT, ABSENT, BROKEN = "ok", "missing", "broken"

WOULD_ESTIMATE = ", so `dpscope ncu` would estimate"
MIN_PYTHON, MIN_TORCH = (3, 10), (2, 6)

# Import name, what cannot be had without it, whether every sweep needs it.
PACKAGES = (
    ("jinja2", "no page (report.html)", True),
    ("matplotlib", "no figures", True),
    ("pandas", "no `report --csv`, `--latex` or data frames", False),
    ("transformers", "no `--model hf:…` or `--hf-config`", False),
    ("peft", "no `--lora`", False),
    ("tensorboard", "no TensorBoard log from `dpscope trace`", False),
    ("ncu_report", ".ncu-rep files are read only where ncu is", False),
)


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check. If a `required` check is not ok, the doctor exits with 1."""

    name: str
    status: str
    found: str
    remedy: str = ""
    required: bool = False

    @classmethod
    def of(cls, name: str, status: str, sentence: str, so: str = "") -> Diagnosis:
        """Return a diagnosis from a sentence `what was found: its remedy`; `so`: what follows."""
        found, _, remedy = sentence.partition(": ")
        return cls(name, status, found + so, remedy)


def diagnose() -> list[Diagnosis]:
    return [found for check in CHECKS for found in check()]


def check_python() -> list[Diagnosis]:
    enough = sys.version_info[:2] >= MIN_PYTHON
    remedy = f"install Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
    return [Diagnosis("Python", PRESENT if enough else BROKEN, platform.python_version(), remedy, required=True)]


def check_torch() -> list[Diagnosis]:
    try:
        import torch
    except ImportError as error:
        return [Diagnosis("torch", ABSENT, f"cannot be imported ({error})", install_command("torch"), required=True)]
    remedy = install_command(f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}")
    status = PRESENT if release_of(torch.__version__) >= MIN_TORCH else BROKEN
    return [Diagnosis("torch", status, torch.__version__, remedy, required=True), *_check_cuda()]


def _check_cuda() -> list[Diagnosis]:
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        driver = "an NVIDIA driver is here" if shutil.which("nvidia-smi") else "no NVIDIA driver was found"
        remedy = "for GPU figures install the NVIDIA driver and a CUDA build of torch; --device cpu works without"
        return [Diagnosis("CUDA", ABSENT, f"{built}, {driver}", remedy)]
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    found = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    remedy = "another process holds memory and will disturb the figures: `nvidia-smi` says which"
    return [
        Diagnosis("CUDA", PRESENT, f"{torch.version.cuda}; {found}"),
        Diagnosis("GPU memory", BROKEN if free < 0.9 * total else PRESENT, memory, remedy),
    ]


def check_opacus() -> list[Diagnosis]:
    try:
        import opacus  # noqa: F401
    except ImportError as error:
        remedy = f"{install_command('opacus')} (without it only `standard` can be measured)"
        return [Diagnosis("Opacus", ABSENT, f"cannot be imported ({error})", remedy)]
    return [Diagnosis("Opacus", PRESENT, version_of("opacus") or "version unknown")]


def check_triton() -> list[Diagnosis]:
    found = version_of("triton")
    if found:
        return [Diagnosis("Triton", PRESENT, found)]
    remedy = f"CUDA builds of torch bring it; otherwise {install_command('triton')}"
    return [Diagnosis("Triton", ABSENT, "not installed: kernels fall back to plain torch", remedy)]


def check_compile() -> list[Diagnosis]:
    """Check what `--compile` needs: a C++ compiler for the CPU, Triton for a GPU."""
    name = "torch.compile"
    try:
        import torch

        from dpscope.trainers.modes import compile_obstacle
    except ImportError:
        return [_not_tried(name)]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    troubles = {device: trouble for device in devices if (trouble := compile_obstacle(device))}
    if not troubles:
        return [Diagnosis(name, PRESENT, f"can compile for {' and '.join(devices)}")]
    found = [trouble.partition(": ") for trouble in troubles.values()]
    said, remedy = ("; ".join(part[place] for part in found) for place in (0, 2))
    return [Diagnosis(name, ABSENT, f"{said}, so `--compile` fails on {' and '.join(troubles)}", remedy)]


def _not_tried(name: str) -> Diagnosis:
    return Diagnosis(name, ABSENT, "not tried without torch", "install torch")


def check_packages() -> list[Diagnosis]:
    """Check the packages for pages, figures, exports and other models without importing them, which takes seconds."""
    found = []
    for package, without, required in PACKAGES:
        version = version_of(package)
        status, said = (PRESENT, version) if version else (ABSENT, f"not installed: {without}")
        found.append(Diagnosis(package, status, said, install_command(package), required=required))
    return found


def check_ncu() -> list[Diagnosis]:
    path = find_ncu()
    if path is None:
        return [Diagnosis.of("Nsight Compute", ABSENT, NO_NCU, WOULD_ESTIMATE)]
    version = ncu_version(path) or "version unknown"
    return [Diagnosis("Nsight Compute", PRESENT, f"{version}, {path}"), _check_counters(path)]


def _check_counters(ncu: str) -> Diagnosis:
    """Profile one small kernel: the only sure way to know whether counters may be read."""
    name = "GPU counters"
    try:
        import torch
    except ImportError:
        return _not_tried(name)
    if not torch.cuda.is_available():
        return Diagnosis(name, ABSENT, "not tried without a GPU", "run on a machine with an NVIDIA GPU")
    if trouble := try_counters(ncu):
        return Diagnosis.of(name, BROKEN, trouble, WOULD_ESTIMATE)
    return Diagnosis(name, PRESENT, "ncu read the DRAM counters of a kernel")


def check_nsys() -> list[Diagnosis]:
    path = find_nsys()
    if path is None:
        return [Diagnosis.of("Nsight Systems", ABSENT, NO_NSYS)]
    version = inspect_nsys(path).version or "version unknown"
    findings = [Diagnosis("Nsight Systems", PRESENT, f"{version}, {path}"), _check_importer(path)]
    if refused := sampling_refused():
        findings.append(Diagnosis.of("CPU sampling", ABSENT, refused))
    return findings


def _check_importer(nsys: str) -> Diagnosis:
    """Check the program that turns nsys's raw captures into reports, and its libraries."""
    name = "nsys importer"
    importer = find_importer(nsys)
    if importer is None:
        remedy = "install a full Nsight Systems: this nsys leaves raw .qdstrm captures"
        return Diagnosis(name, ABSENT, "no QdstrmImporter belongs to this nsys", remedy)
    if library := missing_library(ask(importer, "--help")):
        remedy = f"install {library} (libdw.so.1: apt install libdw1), or add a folder that has it to LD_LIBRARY_PATH"
        return Diagnosis(name, BROKEN, f"it lacks {library}", remedy)
    return Diagnosis(name, PRESENT, "raw captures can be turned into reports")


def check_disk() -> list[Diagnosis]:
    if not os.access(Path.cwd(), os.W_OK):
        return [Diagnosis("Disk", BROKEN, "this folder cannot be written", "change folder, or use --out DIR")]
    free = shutil.disk_usage(Path.cwd()).free / GIB
    status, remedy = PRESENT if free >= 1 else BROKEN, "free some space: traces and reports need about 1 GiB"
    return [Diagnosis("Disk", status, f"{free:.1f} GiB free here", remedy)]


CHECKS: tuple[Callable[[], list[Diagnosis]], ...] = (
    *(check_python, check_torch, check_opacus, check_triton, check_compile, check_packages),
    *(check_ncu, check_nsys, check_disk),
)

"""`dpscope doctor`: what works on this machine, what does not, and how to mend it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from dpscope.commands.console import make_console
from dpscope.instruments.ncu.command import find_ncu, ncu_version
from dpscope.instruments.ncu.failures import NO_NCU
from dpscope.instruments.ncu.running import try_counters
from dpscope.instruments.nsys.failures import NO_NSYS, missing_library, sampling_refused
from dpscope.instruments.nsys.finding import find_importer, find_nsys, look_at
from dpscope.packages import DISTRIBUTIONS, install_command
from dpscope.units import GIB

OK, MISSING, BROKEN = "ok", "missing", "broken"
STYLES = {OK: "green", MISSING: "yellow", BROKEN: "bold red"}

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
class Finding:
    """One thing that was looked at. What is `required` and not ok makes the doctor exit with 1."""

    name: str
    status: str
    found: str
    remedy: str = ""
    required: bool = False


@click.command(name="doctor")
def command() -> None:
    """Check Python, torch, CUDA, Opacus, Triton, other packages, Nsight and disk; say how to mend what is missing."""
    findings = [finding for check in CHECKS for finding in check()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("what", "status", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        found = finding.found if finding.status == OK else f"{finding.found}. To mend: {finding.remedy}"
        table.add_row(finding.name, Text(finding.status, style=STYLES[finding.status]), found)
    console = make_console()
    console.print(table)
    blocked = [finding.name for finding in findings if finding.required and finding.status != OK]
    if blocked:
        console.print(f"\nNothing can be measured before this is mended: {', '.join(blocked)}.")
        sys.exit(1)
    console.print("\nReady: try `dpscope compare`.")


def check_python() -> list[Finding]:
    enough = sys.version_info[:2] >= MIN_PYTHON
    remedy = f"install Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
    return [Finding("Python", OK if enough else BROKEN, platform.python_version(), remedy, required=True)]


def check_torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("torch", MISSING, f"cannot be imported ({error})", install_command("torch"), required=True)]
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    remedy = install_command(f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}")
    status = OK if numbers >= MIN_TORCH else BROKEN
    return [Finding("torch", status, torch.__version__, remedy, required=True), *_check_cuda()]


def _check_cuda() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        driver = "an NVIDIA driver is here" if shutil.which("nvidia-smi") else "no NVIDIA driver was found"
        remedy = "for GPU figures install the NVIDIA driver and a CUDA build of torch; --device cpu works without"
        return [Finding("CUDA", MISSING, f"{built}, {driver}", remedy)]
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    found = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    busy = free < 0.9 * total
    return [
        Finding("CUDA", OK, f"{torch.version.cuda}; {found}"),
        Finding(
            "GPU memory",
            BROKEN if busy else OK,
            memory,
            "another process holds memory and will disturb the figures: `nvidia-smi` says which",
        ),
    ]


def check_opacus() -> list[Finding]:
    try:
        import opacus  # noqa: F401
    except ImportError as error:
        remedy = f"{install_command('opacus')} (without it only `standard` can be measured)"
        return [Finding("Opacus", MISSING, f"cannot be imported ({error})", remedy)]
    return [Finding("Opacus", OK, _version("opacus"))]


def check_triton() -> list[Finding]:
    found = _version("triton")
    if found:
        return [Finding("Triton", OK, found)]
    remedy = f"CUDA builds of torch bring it; otherwise {install_command('triton')}"
    return [Finding("Triton", MISSING, "not installed: kernels fall back to plain torch", remedy)]


def check_packages() -> list[Finding]:
    """What pages, figures, exports and models of others need. Nothing here is imported: that would take seconds."""
    return [_check_package(*row) for row in PACKAGES]


def _check_package(package: str, without: str, required: bool) -> Finding:
    found = _version(DISTRIBUTIONS.get(package, package))
    status, said = (OK, found) if found else (MISSING, f"not installed: {without}")
    return Finding(package, status, said, install_command(package), required=required)


def check_ncu() -> list[Finding]:
    path = find_ncu()
    if path is None:
        found, _, remedy = NO_NCU.partition(": ")
        return [Finding("Nsight Compute", MISSING, f"{found}, so `dpscope ncu` would estimate", remedy)]
    version = ncu_version(path) or "version unknown"
    return [Finding("Nsight Compute", OK, f"{version}, {path}"), _check_counters(path)]


def _check_counters(ncu: str) -> Finding:
    """Profile one small kernel: the only sure way to know whether counters may be read."""
    name = "GPU counters"
    try:
        import torch
    except ImportError:
        return Finding(name, MISSING, "not tried without torch", "install torch")
    if not torch.cuda.is_available():
        return Finding(name, MISSING, "not tried without a GPU", "run on a machine with an NVIDIA GPU")
    trouble = try_counters(ncu)
    if trouble is None:
        return Finding(name, OK, "ncu read the DRAM counters of a kernel")
    found, _, remedy = trouble.partition(": ")
    return Finding(name, BROKEN, f"{found}, so `dpscope ncu` would estimate", remedy)


def check_nsys() -> list[Finding]:
    path = find_nsys()
    if path is None:
        what, _, remedy = NO_NSYS.partition(": ")
        return [Finding("Nsight Systems", MISSING, what, remedy)]
    findings = [Finding("Nsight Systems", OK, f"{look_at(path).version or 'version unknown'}, {path}")]
    return [*findings, *_check_importer(path), *_check_sampling()]


def _check_importer(nsys: str) -> list[Finding]:
    """nsys records raw captures; what makes reports of them is a program of its own, with libraries of its own."""
    name = "nsys importer"
    importer = find_importer(nsys)
    if importer is None:
        remedy = "install a full Nsight Systems: this nsys leaves raw .qdstrm captures"
        return [Finding(name, MISSING, "no QdstrmImporter belongs to this nsys", remedy)]
    if library := missing_library(_output([importer, "--help"], timeout=30)):
        remedy = f"install {library} (libdw.so.1: apt install libdw1), or add a folder that has it to LD_LIBRARY_PATH"
        return [Finding(name, BROKEN, f"it lacks {library}", remedy)]
    return [Finding(name, OK, "raw captures can be turned into reports")]


def _check_sampling() -> list[Finding]:
    refused = sampling_refused()
    if refused is None:
        return []
    what, _, remedy = refused.partition(": ")
    return [Finding("CPU sampling", MISSING, what, remedy)]


def check_disk() -> list[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    writable = os.access(Path.cwd(), os.W_OK)
    if not writable:
        return [Finding("Disk", BROKEN, "this folder cannot be written", "change folder, or use --out DIR")]
    status = OK if free >= 1 else BROKEN
    return [
        Finding("Disk", status, f"{free:.1f} GiB free here", "free some space: traces and reports need about 1 GiB")
    ]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_torch,
    check_opacus,
    check_triton,
    check_packages,
    check_ncu,
    check_nsys,
    check_disk,
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(command_line: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr

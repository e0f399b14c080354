"""Runs of ncu around a program: its location, command line, time limit, and its messages with remedies.

A run is repeated without the metrics and options that ncu refuses.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dpscope.instruments import processes
from dpscope.instruments.ncu.metrics import DRAM_READ, KERNEL_METRICS
from dpscope.instruments.processes import FinishedCommand, OnLine, run_limited, unknown_option
from dpscope.units import format_duration

# Where installers put it when it is not on the PATH.
NCU_PATTERNS = ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu")

# Never touch clocks or caches: a step is to be seen as it runs in training. Without SASS a report of a range is well
# under 1 MB instead of 64. Options that an older ncu does not know are left out when it says so.
COMMON_OPTIONS = (
    "--clock-control=none",
    "--cache-control=none",
    "--import-sass=no",
    "--disable-extra-suffixes",
    "--target-processes=all",
)


def find_ncu() -> str | None:
    """Return $NCU, or `ncu` on the PATH, or the newest in the usual folders."""
    if asked := os.environ.get("NCU"):
        return shutil.which(asked)
    return shutil.which("ncu") or processes.newest(NCU_PATTERNS)


def ncu_version(ncu: str) -> str | None:
    return processes.find_version(processes.ask(ncu, "--version"), numbers=3)


def range_command(ncu: str, program: Sequence[str], report: Path, metrics: Iterable[str]) -> list[str]:
    """Return the command for one row from `cudaProfilerStart` to `Stop`; the program runs once for each pass."""
    return [ncu, "--replay-mode=app-range", *_what(report, metrics), *program]


def kernel_command(
    ncu: str, program: Sequence[str], report: Path, metrics: Iterable[str], *, kernel: str | None = None
) -> list[str]:
    """Return the command for one row a kernel from `cudaProfilerStart` to `Stop`, with its phase (NVTX)."""
    only = ["--kernel-name-base=demangled", f"--kernel-name=regex:{kernel}"] if kernel else []
    mode = ["--replay-mode=kernel", "--profile-from-start=off", "--nvtx", *only]
    return [ncu, *mode, *_what(report, metrics), *program]


def csv_command(ncu: str, report: Path) -> list[str]:
    """Return the command that prints a report as CSV: names, units, then numbers with thousands separators."""
    shown = ["--csv", "--page=raw", "--print-units=base", "--print-kernel-base=demangled"]
    return [ncu, "--import", str(report), *shown]


def _what(report: Path, metrics: Iterable[str]) -> list[str]:
    escaped = str(report).replace("%", "%%")  # ncu fills in %p, %i and the like
    return [*COMMON_OPTIONS, f"--metrics={','.join(metrics)}", "--force-overwrite", f"--export={escaped}"]


NO_GPU_TO_COUNT = "there is no GPU to count on: run on a machine with an NVIDIA GPU and --device cuda"
NO_NCU = (
    "no `ncu` was found: install NVIDIA Nsight Compute and put `ncu` on the PATH, or set NCU=/path/to/ncu "
    "(it also comes with the CUDA toolkit: /usr/local/cuda/bin/ncu)"
)
COUNTERS_REMEDY = (
    "performance counters are for administrators only here: run as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0 (put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file "
    "in /etc/modprobe.d/, then reboot); in a container add --cap-add=SYS_ADMIN; on a rented GPU ask the provider"
)
# The same failure is told by `dpscope ncu` and by the script, each of which has its own words for these.
LONGER_TIMEOUT = "--timeout, or LIMIT for run_profiling_ncu.sh"
NCU_BY_HAND = "run its command by hand (`dpscope ncu --print-command`; run_profiling_ncu.sh keeps it in the run's .log)"

# What ncu prints -> what happened and what to do. The first that is found decides.
_REMEDIES = {
    "ERR_NVGPUCTRPERM": f"ncu may not read GPU counters (ERR_NVGPUCTRPERM): {COUNTERS_REMEDY}",
    r"driver resource was unavailable|ProfilerInUse|already in use": (
        "another tool holds the GPU's counters: end it, or pause it (`dcgmi profile --pause`, later `--resume`)"
    ),
    r"nsight-compute-lock": (
        "ncu cannot write its lock file: set TMPDIR to a folder of your own, or remove nsight-compute-lock there"
    ),
    r"driver is not compatible with Nsight Compute|[Uu]nsupported driver|Failed to initialize the profiler": (
        "this ncu does not fit the NVIDIA driver: install an Nsight Compute as new as the driver (see `nvidia-smi`)"
    ),
    r"is not supported on (this|the) (device|chip)|GPU is not supported": (
        "this ncu does not know this GPU: install a newer one"
    ),
    r"No space left on device": "the disk is full: free some space in --out and TMPDIR",
}
_PROGRAM_FAILED = "The application returned an error code"
_UNKNOWN_METRIC = re.compile(
    r"Failed to find metric (?:regex:\^?)?([\w.]+)|Metric ([\w.]+) is not supported in \w+ replay"
)


def unknown_metrics(output: str) -> list[str]:
    """Return the metrics that ncu reports as missing on this GPU, or as not countable in this mode."""
    found = (absent or unsupported for absent, unsupported in _UNKNOWN_METRIC.findall(output))
    return list(dict.fromkeys(name.rstrip(".") for name in found))


def took_too_long(seconds: float) -> str:
    return (
        f"ncu gave no report within {format_duration(seconds)} and was ended: give it longer ({LONGER_TIMEOUT}), use a "
        "smaller size, or see whether another profiler runs or `nvidia-smi` hangs as well"
    )


def why_no_counts(output: str, returncode: int) -> str:
    """Return why ncu left no report, as a sentence with the remedy."""
    if remedy := processes.find_remedy(output, _REMEDIES):
        return remedy
    if option := unknown_option(output):
        return f"this ncu does not know {option}: install Nsight Compute 2023.1 or newer"
    if "No kernels were profiled" in output or "No ranges were profiled" in output:
        return f"ncu saw nothing between the start and the stop of the step: {NCU_BY_HAND}"
    if _PROGRAM_FAILED in output and (complaint := re.search(r"^Error: (.+)$", output, re.MULTILINE)):
        return f"the program under ncu failed: {complaint.group(1)}"
    said = [line.strip() for line in output.splitlines() if "==ERROR==" in line]
    last = said[-1].replace("==ERROR==", "").strip() if said else f"exit code {returncode}, without a message"
    return f"ncu failed ({last}): {NCU_BY_HAND}"


ATTEMPTS = 6  # each but the last may lose metrics or options that this ncu or this GPU does not know
PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class NcuCapture:
    """A report, or the sentence that says why there is none.

    `refused`: metrics that this GPU does not have and options that this ncu does not know.
    """

    command: list[str]
    output: str
    failure: str | None = None
    refused: list[str] = field(default_factory=list)


def try_counters(ncu: str) -> str | None:
    """Return why counters cannot be read, or None. It counts one small kernel to find out."""
    done = _try_kernel(ncu, [DRAM_READ])
    if done.timed_out:
        return took_too_long(PROBE_SECONDS)
    counted = DRAM_READ in done.output and "==ERROR==" not in done.output
    return None if counted else why_no_counts(done.output, done.returncode)


def one_pass_metrics(ncu: str, tensor_operations: str) -> tuple[str, ...]:
    """Return the metrics of a kernel that fit in one pass, tried on one small kernel: chips differ."""
    wanted = (*KERNEL_METRICS, tensor_operations)
    passes = re.search(r"- (\d+) pass", _try_kernel(ncu, wanted).output)
    return wanted if passes is not None and passes.group(1) == "1" else KERNEL_METRICS


def _try_kernel(ncu: str, metrics: Sequence[str]) -> FinishedCommand:
    script = "import torch; torch.ones(1 << 20, device='cuda').mul_(2); torch.cuda.synchronize()"
    options = [f"--metrics={','.join(metrics)}", "--launch-count=1", "--clock-control=none"]
    return run_limited([ncu, *options, sys.executable, "-c", script], limit=PROBE_SECONDS)


def take_report(
    make_command: Callable[[Sequence[str]], list[str]],
    metrics: Sequence[str],
    report: Path,
    *,
    limit: float,
    on_line: OnLine = lambda line: None,
    may_be_cut: bool = False,
) -> NcuCapture:
    """Run ncu until it leaves `report`, dropping metrics and options that it refuses.

    `make_command` turns the metrics that are left into a command. `may_be_cut`: the program ends itself when its time
    is over. ncu then reports an error, but keeps its counts.
    """
    wanted, refused = list(metrics), list[str]()
    deadline = time.monotonic() + limit
    for _ in range(ATTEMPTS):
        command = [part for part in make_command(wanted) if part.partition("=")[0] not in refused]
        report.unlink(missing_ok=True)
        done = run_limited(command, limit=max(deadline - time.monotonic(), 1.0), on_line=on_line)
        lacking = [name for name in unknown_metrics(done.output) if name in wanted]
        option = unknown_option(done.output)
        taken = report.exists() and (done.returncode == 0 or may_be_cut)
        if done.timed_out or taken:
            break
        if lacking and len(lacking) < len(wanted):
            wanted = [name for name in wanted if name not in lacking]
            refused += lacking
        elif option in {part.partition("=")[0] for part in command}:
            refused.append(str(option))
        else:
            break
    failure = took_too_long(limit) if done.timed_out else why_no_counts(done.output, done.returncode)
    return NcuCapture(command, done.output, None if taken and not done.timed_out else failure, refused)

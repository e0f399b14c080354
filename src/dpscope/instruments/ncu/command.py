"""Location of ncu, and the command line that makes it count."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpscope.instruments.nsight import ask, find_version, newest

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
    return shutil.which("ncu") or newest(NCU_PATTERNS)


def ncu_version(ncu: str) -> str | None:
    return find_version(ask(ncu, "--version"), numbers=3)


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

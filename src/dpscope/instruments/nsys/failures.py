"""Messages of nsys, each with its remedy, and checks before it is run."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dpscope.instruments.nsight import find_remedy, unknown_option

NO_GPU_TO_RECORD = "there is no GPU to look at: run on a machine with an NVIDIA GPU and --device cuda"
NO_NSYS = (
    "no `nsys` was found: install NVIDIA Nsight Systems and put `nsys` on the PATH, or set NSYS=/path/to/nsys "
    "(Nsight Compute brings one along: nsight-compute/…/host/target-linux-x64/nsys)"
)
COUNTERS = (
    "GPU metrics are counters for administrators only here: leave out --gpu-metrics, run as root, or load the driver "
    "with NVreg_RestrictProfilingToAdminUsers=0; on a rented GPU ask the provider"
)
SAMPLING = (
    "--cpu-sampling needs a kernel that lets you: `echo 1 | sudo tee /proc/sys/kernel/perf_event_paranoid` (until the "
    "next boot), or run as root, or leave it out"
)
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
MAX_PARANOID = 2  # nsys samples the host's threads up to here

NSYS_BY_HAND = "run the command by hand (--print-command)"

# What nsys prints -> what happened and what to do. The first that is found decides.
_REMEDIES = {
    r"ERR_NVGPUCTRPERM|Insufficient privilege|permission.*GPU [Mm]etrics": COUNTERS,
    r"Illegal --gpu-metrics-device": (
        "this nsys has no GPU metrics for this GPU, or may not read them: leave out --gpu-metrics"
    ),
    r"perf_event_paranoid": SAMPLING,
    r"No space left on device": ("the disk is full: free some space in --out, or set TMPDIR to a folder with space"),
    r"Permission denied|Failed to create.*(directory|file)|Read-only file system": (
        "nsys cannot write its files: choose an --out folder and a TMPDIR that you can write"
    ),
    r"CUPTI_ERROR|CUPTI.*(not be initialized|failed)|Subscribe returned": (
        "nsys cannot trace CUDA here: another profiler may be attached (DCGM: `dcgmi profile --pause`), or this nsys "
        "is older than the driver (see `nvidia-smi`): end the one or install a newer nsys"
    ),
    r"session .*(already exists|is already running)|another .*session": (
        "another nsys session is open: `nsys sessions list` shows it, `nsys shutdown --session=NAME` ends it"
    ),
}
_MISSING_LIBRARY = re.compile(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file")


def missing_library(output: str) -> str | None:
    """Return the shared library that a program lacked, by its message; None if it lacked none."""
    match = _MISSING_LIBRARY.search(output)
    return match.group(1) if match else None


def why_no_report(output: str, returncode: int) -> str:
    """Return why `nsys profile` left no report, as a sentence with the remedy."""
    if remedy := find_remedy(output, _REMEDIES):
        return remedy
    if option := unknown_option(output):
        return f"this nsys does not know {option}: install Nsight Systems 2021.3 or newer"
    if "No reports were generated" in output:
        return (
            "nsys recorded nothing between the start and the stop of the steps: see whether another profiler is "
            f"attached, and {NSYS_BY_HAND}"
        )
    return f"nsys left no report ({_last_line(output)}, exit code {returncode}): {NSYS_BY_HAND}"


def why_not_imported(raw: Path, importer: str | None, output: str = "") -> str:
    """Return how to turn nsys's raw capture into a report, and why that did not happen here."""
    by_hand = f"{importer or 'QdstrmImporter'} -i {raw} -o {raw.with_suffix('.nsys-rep')}"
    left = f"nsys left a raw capture, {raw}, that is no report yet"
    if importer is None:
        return (
            f"{left}: this nsys comes without its importer. With a full Nsight Systems, as new or newer, anywhere: "
            f"`{by_hand}` (the importer is in its host-linux-x64 folder), then `dpscope nsys --read` the report"
        )
    if missing := missing_library(output):
        return (
            f"{left}: the importer lacks {missing}. Install it (libdw.so.1: `apt install libdw1`), or point "
            f"LD_LIBRARY_PATH to a folder that has it, and measure again; by hand: `{by_hand}`"
        )
    return f"{left}: the importer failed ({_last_line(output)}); by hand: `{by_hand}`"


def why_not_exported(report: Path, output: str) -> str:
    by_hand = f"nsys export --type=sqlite --output={report.with_suffix('.sqlite')} {report}"
    if missing := missing_library(output):
        why = f"it lacks {missing}: install it, or point LD_LIBRARY_PATH to a folder that has it"
    else:
        why = _last_line(output)
    return (
        f"the report is there, {report} (open it with nsys-ui), but nsys did not export it ({why}). With a full Nsight "
        f"Systems: `{by_hand}`, then `dpscope nsys --read {report.with_suffix('.sqlite')}`"
    )


def sampling_refused() -> str | None:
    """Return why the host's threads cannot be sampled here; None if they can."""
    try:
        level = int(PARANOID.read_text())
    except (OSError, ValueError):
        return None
    if level <= MAX_PARANOID or os.geteuid() == 0:
        return None
    return f"perf_event_paranoid is {level} here and nsys needs {MAX_PARANOID} or less: {SAMPLING}"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "without a message"

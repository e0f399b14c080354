"""ncu's messages, each with what a person can do about it. `dpscope doctor` and every measurement say the same."""

from __future__ import annotations

import re

from dpscope.instruments.nsight import find_remedy, unknown_option
from dpscope.units import format_duration

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
    """Return the metrics that ncu says this GPU does not have, or cannot count in this way."""
    found = (absent or unsupported for absent, unsupported in _UNKNOWN_METRIC.findall(output))
    return list(dict.fromkeys(name.rstrip(".") for name in found))


def took_too_long(seconds: float) -> str:
    return (
        f"ncu gave no report within {format_duration(seconds)} and was ended: give it longer ({LONGER_TIMEOUT}), use a "
        "smaller size, or see whether another profiler runs or `nvidia-smi` hangs as well"
    )


def why_no_counts(output: str, returncode: int) -> str:
    """Return why ncu left no report, as a sentence with the remedy."""
    if remedy := find_remedy(output, _REMEDIES):
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

"""Messages of nsys, each with its remedy, and checks before it is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dpscope.instruments.nsys.command import Nsys, NsysOptions, find_importer, profile_command
from dpscope.instruments.processes import OnLine, find_remedy, run_limited, unknown_option
from dpscope.places import number_in

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


def sampling_refused() -> str | None:
    """Return why the host's threads cannot be sampled here; None if they can."""
    level = number_in(PARANOID, r"(-?\d+)")
    if level is None or level <= MAX_PARANOID or os.geteuid() == 0:
        return None
    return f"perf_event_paranoid is {level} here and nsys needs {MAX_PARANOID} or less: {SAMPLING}"


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "without a message"


Assignment = bytes  # NAME=VALUE

# A new /proc that shows only what is started inside; nothing inside outlives `unshare`.
_NAMESPACE = ("--pid", "--fork", "--mount-proc", "--kill-child")
_AS_ORDINARY_USER = ("--user", "--map-current-user")


@cache
def isolation_prefix() -> tuple[str, ...]:
    """Return a prefix that hides all other processes from a command; nothing if the system cannot do that."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, *_NAMESPACE, *(() if os.geteuid() == 0 else _AS_ORDINARY_USER))
    try:
        works = subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    return command if works else ()


def foreign_assignments(passed_on: Mapping[str, str]) -> set[Assignment]:
    """Return NAME=VALUE of every process whose environment can be read, except those given to the profiled process."""
    found: set[Assignment] = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.update(environment.read_bytes().split(b"\0"))
        except OSError:
            continue  # another user's, or gone
    return {each for each in found if each.partition(b"=")[2]} - {f"{n}={v}".encode() for n, v in passed_on.items()}


@dataclass(frozen=True)
class NsysCapture:
    """Files that a run of nsys left, and the sentence that says what is missing and how to get it."""

    command: list[str]
    report: Path | None = None  # .nsys-rep, or the raw .qdstrm where it could not be imported
    database: Path | None = None  # its SQLite export
    failure: str | None = None
    output: str = ""
    foreign_variables: list[str] = field(default_factory=list)  # of other processes, by name, that it holds


def take_capture(
    nsys: Nsys,
    program: Sequence[str],
    folder: Path,
    name: str,
    looking: NsysOptions,
    *,
    environment: Mapping[str, str],
    on_line: OnLine = lambda line: None,
) -> NsysCapture:
    """Run `program` under nsys and leave `name.nsys-rep` and `name.sqlite` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = profile_command(nsys, program, folder / name, looking)
    others = foreign_assignments(environment)
    # The row's own limit ends it.
    done = run_limited([*isolation_prefix(), *command], environment=environment, on_line=on_line)
    output = done.output
    report = folder / f"{name}.nsys-rep"
    raw = folder / f"{name}.qdstrm"  # which nsys leaves, there or where it says, if it could not make a report
    elsewhere = re.findall(r"Generating '([^']+\.qdstrm)'", output)
    if not raw.exists() and elsewhere and Path(elsewhere[-1]).exists():
        shutil.move(elsewhere[-1], raw)
    if not report.exists() and raw.exists():
        importer = find_importer(nsys.path)
        said = ""
        if importer is not None:
            on_line("importing the raw capture\n")
            said = run_limited([importer, "-i", str(raw), "-o", str(report)], environment=environment).output
        if not report.exists():
            return NsysCapture(command, raw, None, why_not_imported(raw, importer, said), output + said)
        raw.unlink(missing_ok=True)
    if not report.exists():
        return NsysCapture(command, None, None, why_no_report(output, done.returncode), output)
    database, failure, said = export_report(nsys.path, report, environment=environment)
    others |= foreign_assignments(environment)
    content = (database or report).read_bytes()
    foreign = sorted({each.partition(b"=")[0].decode(errors="replace") for each in others if each in content})
    return NsysCapture(command, report, database, failure, output + said, foreign)


def export_report(nsys: str, report: Path, *, environment: Mapping[str, str]) -> tuple[Path | None, str | None, str]:
    """Return a report's SQLite export beside it, or why there is none; and what nsys said."""
    database = report.with_suffix(".sqlite")
    database.unlink(missing_ok=True)
    command = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
    said = run_limited(command, environment=environment).output
    if database.exists():
        return database, None, said
    by_hand = f"nsys export --type=sqlite --output={database} {report}"
    missing = missing_library(said)
    lacking = f"it lacks {missing}: install it, or point LD_LIBRARY_PATH to a folder that has it"
    failure = (
        f"the report is there, {report} (open it with nsys-ui), but nsys did not export it "
        f"({lacking if missing else _last_line(said)}). With a full Nsight Systems: `{by_hand}`, then `dpscope nsys "
        f"--read {database}`"
    )
    return None, failure, said

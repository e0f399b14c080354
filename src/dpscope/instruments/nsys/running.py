"""Capture by nsys: run it around a program, make a report, and export that as SQLite.

nsys writes the environment of all processes it finds into its report (docs/nsys.md). So it runs in a PID namespace of
its own if the system allows one, and every export is searched for variables of others.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dpscope.instruments.nsys.command import (
    Nsys,
    NsysOptions,
    export_command,
    find_importer,
    import_raw_command,
    profile_command,
)
from dpscope.instruments.nsys.failures import why_no_report, why_not_exported, why_not_imported
from dpscope.instruments.processes import OnLine, run_limited

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


def assigned_in(file: Path, assignments: Iterable[Assignment]) -> list[str]:
    """Return the names of the variables whose assignments occur in a file."""
    content = file.read_bytes()
    return sorted({each.partition(b"=")[0].decode(errors="replace") for each in assignments if each in content})


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
    raw = _raw_capture(folder / f"{name}.qdstrm", output)
    if not report.exists() and raw is not None:
        importer = find_importer(nsys.path)
        said = ""
        if importer is not None:
            on_line("importing the raw capture\n")
            said = run_limited(import_raw_command(importer, raw, report), environment=environment).output
        if not report.exists():
            return NsysCapture(command, raw, None, why_not_imported(raw, importer, said), output + said)
        raw.unlink(missing_ok=True)
    if not report.exists():
        return NsysCapture(command, None, None, why_no_report(output, done.returncode), output)
    database, failure, said = export_report(nsys.path, report, environment=environment)
    others |= foreign_assignments(environment)
    return NsysCapture(command, report, database, failure, output + said, assigned_in(database or report, others))


def _raw_capture(expected: Path, output: str) -> Path | None:
    """Return the raw capture that nsys left if it could not make a report: beside it, or where nsys says it is."""
    if expected.exists():
        return expected
    said = re.findall(r"Generating '([^']+\.qdstrm)'", output)
    if said and Path(said[-1]).exists():
        shutil.move(said[-1], expected)
        return expected
    return None


def export_report(nsys: str, report: Path, *, environment: Mapping[str, str]) -> tuple[Path | None, str | None, str]:
    """Return a report's SQLite export beside it, or why there is none; and what nsys said."""
    database = report.with_suffix(".sqlite")
    database.unlink(missing_ok=True)
    said = run_limited(export_command(nsys, report, database), environment=environment).output
    if database.exists():
        return database, None, said
    return None, why_not_exported(report, said), said

"""Takes a capture: runs nsys around a program, makes a report of what it left, and exports the report as SQLite."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dpscope.instruments.nsys.command import Looking, export_command, import_command, profile_command
from dpscope.instruments.nsys.failures import why_no_report, why_not_exported, why_not_imported
from dpscope.instruments.nsys.finding import Nsys, find_importer

OnLine = Callable[[str], None]

DRAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Capture:
    """What a run of nsys left, and the sentence that says what is missing and how to get it."""

    command: list[str]
    report: Path | None = None  # .nsys-rep, or the raw .qdstrm where it could not be imported
    database: Path | None = None  # its SQLite export
    failure: str | None = None
    output: str = ""


def take(
    nsys: Nsys,
    program: Sequence[str],
    folder: Path,
    name: str,
    looking: Looking,
    *,
    environment: Mapping[str, str],
    on_line: OnLine = lambda line: None,
) -> Capture:
    """Run `program` under nsys and leave `name.nsys-rep` and `name.sqlite` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = profile_command(nsys, program, folder / name, looking)
    returncode, output = run(command, environment=environment, on_line=on_line)
    report = folder / f"{name}.nsys-rep"
    raw = _raw_capture(folder / f"{name}.qdstrm", output)
    if not report.exists() and raw is not None:
        importer = find_importer(nsys.path)
        said = ""
        if importer is not None:
            on_line("importing the raw capture\n")
            _, said = run(import_command(importer, raw, report), environment=environment)
        if not report.exists():
            return Capture(command, raw, None, why_not_imported(raw, importer, said), output + said)
        raw.unlink(missing_ok=True)
    if not report.exists():
        return Capture(command, None, None, why_no_report(output, returncode), output)
    database, failure, said = export(nsys.path, report, environment=environment)
    return Capture(command, report, database, failure, output + said)


def _raw_capture(expected: Path, output: str) -> Path | None:
    """What nsys left where it could not make a report: beside it, or still where it says that it generated it."""
    if expected.exists():
        return expected
    said = re.findall(r"Generating '([^']+\.qdstrm)'", output)
    if said and Path(said[-1]).exists():
        shutil.move(said[-1], expected)
        return expected
    return None


def export(nsys: str, report: Path, *, environment: Mapping[str, str]) -> tuple[Path | None, str | None, str]:
    """A report's SQLite export beside it, or why there is none; and what nsys said."""
    database = report.with_suffix(".sqlite")
    database.unlink(missing_ok=True)
    _, said = run(export_command(nsys, report, database), environment=environment)
    if database.exists():
        return database, None, said
    return None, why_not_exported(report, said), said


def run(
    command: Sequence[str], *, environment: Mapping[str, str], on_line: OnLine = lambda line: None
) -> tuple[int, str]:
    """Run a command to its end and hand on its lines as they come; its exit code and all it printed.

    It sees no variable but those of `environment`. There is no time limit here: the row's own limit ends the whole
    process group.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=dict(environment),
        )
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}\n"
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process.stdout, lines, on_line), daemon=True)
    reader.start()
    returncode = process.wait()
    reader.join(DRAIN_SECONDS)  # not for ever: a daemon that nsys leaves behind may hold the pipe
    return returncode, "".join(lines)


def _read(stream: IO[str], lines: list[str], on_line: OnLine) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            on_line(line)

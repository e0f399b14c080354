"""Recording of a few steps by Nsight Systems. The program gets only the variables it needs (docs/nsys.md)."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.instruments.nsys import command
from dpscope.instruments.nsys.command import Nsys, NsysOptions, find_nsys, inspect_nsys, needed_variables
from dpscope.instruments.nsys.reading import UnreadableCapture, read_timeline
from dpscope.instruments.nsys.running import NO_GPU_TO_RECORD, NO_NSYS, export_report, sampling_refused, take_capture
from dpscope.instruments.nsys.summary import summarise_timeline
from dpscope.instruments.timing import Progress
from dpscope.results.payloads.trace import NsysPayload
from dpscope.results.schema import Result, result_for
from dpscope.runner.ranged_step import KEEP_GOING, program, read_outcome
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.statuses import FAILED, OK


def measure_nsys(spec: RunSpec, progress: Progress, files: Path) -> Result:
    nsys = inspect_nsys(require_nsys(spec))
    ended: dict[str, Any] = {}

    def on_line(line: str) -> None:
        if outcome := read_outcome(line):
            ended.update(outcome)
            progress("nsys writes its report", 0, 1)

    progress("under nsys", 0, 1)
    variables = needed_variables(os.environ)
    taken = take_capture(
        nsys, program(spec), files, report_name(spec), capture_settings(spec), environment=variables, on_line=on_line
    )
    part: dict[str, Any] = {"nsys_version": nsys.version, "command": taken.command}
    part["foreign_variables"] = taken.foreign_variables
    status, reason = ended.get("status", OK), ended.get("reason")
    if status != OK:
        reason = f"under nsys: {reason}"
    elif taken.database is not None:
        progress("reading the capture", 0, 1)
        try:
            part |= summarise_timeline(read_timeline(taken.database))
        except UnreadableCapture as error:
            status, reason = FAILED, str(error)
    else:
        status, reason = FAILED, taken.failure
    found = {"Nsight Systems report": taken.report, "its SQLite export": taken.database}
    return result_for(
        spec.to_dict(),
        status=status,
        reason=reason,
        details=None if status == OK else taken.output[-4000:],
        nsys=part,
        files={what: path.name for what, path in found.items() if path is not None},
    )


def obstacle(device: str) -> str | None:
    """Return why nsys cannot record on a device here; None if it may work."""
    if device != "cuda":
        return NO_GPU_TO_RECORD
    return None if find_nsys() else NO_NSYS


def require_nsys(spec: RunSpec) -> str:
    """Return where nsys is, or raise a sentence that says why this spec cannot be recorded here."""
    if (why := obstacle(spec.device)) is not None:
        raise UserError(why)
    path = find_nsys()
    assert path is not None
    if spec.option("cpu_sampling") and (refused := sampling_refused()) is not None:
        raise UserError(refused)
    return path


def capture_settings(spec: RunSpec) -> NsysOptions:
    return NsysOptions(**{each.name: spec.option(each.name) for each in fields(NsysOptions)})


def report_name(spec: RunSpec) -> str:
    """Return the report's file name, which says what was measured."""
    return spec.label.replace(" ", "_")


def find_or_assume_nsys() -> Nsys:
    """Return this machine's nsys, or assume one with every option, because a printed command is for another machine."""
    if path := find_nsys():
        return inspect_nsys(path)
    print("No nsys on this machine: the command is for one that has a recent one on its PATH.", file=sys.stderr)
    return Nsys("nsys", None, frozenset())


def printed_command(spec: RunSpec, nsys: Nsys, folder: Path) -> str:
    """Return the command that records a spec's steps, with the environment it gets."""
    line = command.profile_command(nsys, program(spec), folder / report_name(spec), capture_settings(spec))
    return command.shell_line(line, needed_variables(os.environ))


def recording_commands(spec: RunSpec, nsys: Nsys) -> list[str]:
    """Return what to type to record by hand while a spec's workload trains: launch, start, stop."""
    session, environment = report_name(spec).replace("_", "-"), needed_variables(os.environ)
    training = program(spec, KEEP_GOING)
    return command.interactive_commands(
        nsys, training, capture_settings(spec), session=session, environment=environment
    )


def read_nsys_capture(path: Path) -> NsysPayload:
    """Return the summary of a `.sqlite` or `.nsys-rep` file; the latter is exported first, beside it."""
    if path.suffix == ".nsys-rep" and path.is_file():
        report, path = path, path.with_suffix(".sqlite")
        if not path.exists():
            nsys = find_nsys()
            if nsys is None:
                raise UserError(f"{report} has to be exported first, and {NO_NSYS}")
            made, failure, _ = export_report(nsys, report, environment=needed_variables(os.environ))
            if made is None:
                raise UserError(str(failure))
    return summarise_timeline(read_timeline(path))

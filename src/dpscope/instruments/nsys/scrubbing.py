"""Takes other processes' variables out of a report.

nsys writes down the environment of every process on the machine that it may read (seen with 2025.3.1: of the shell, of
`dpscope` itself, of the worker), not only of the one it profiles. Giving the profiled process few variables is not
enough: what the others had is overwritten in the report, each value by as many letters x, before it is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

Assignment = bytes  # NAME=VALUE


def readable_assignments(passed_on: Mapping[str, str]) -> set[Assignment]:
    """Every variable of every process that can be looked at now, but for those that the profiled process was given."""
    found: set[Assignment] = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.update(environment.read_bytes().split(b"\0"))
        except OSError:
            continue  # another user's, or gone
    return {each for each in found if each.partition(b"=")[2]} - {f"{n}={v}".encode() for n, v in passed_on.items()}


def scrub(report: Path, assignments: Iterable[Assignment]) -> None:
    """Overwrite the value of each assignment that stands in the report; its length stays, so the report can be read."""
    content = report.read_bytes()
    for assignment in sorted(assignments, key=len, reverse=True):  # no value hides behind one that it begins with
        name, _, value = assignment.partition(b"=")
        content = content.replace(assignment, name + b"=" + b"x" * len(value))
    report.write_bytes(content)


def still_there(file: Path, assignments: Iterable[Assignment]) -> list[str]:
    """The names of the variables whose assignment a file holds."""
    content = file.read_bytes()
    return sorted({each.partition(b"=")[0].decode(errors="replace") for each in assignments if each in content})

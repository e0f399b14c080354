"""Keeps the variables of other processes out of a report, and looks for those that are in it all the same.

nsys writes down the environment of the processes it finds on the machine (seen with 2025.3.1: of the shell, of dpscope
itself, of the worker), not only of the one it profiles: giving that one few variables is not enough. So nsys is run
where it sees no others, in a PID namespace of its own, if the system allows one; and the export of every report is
searched for what they hold.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

Assignment = bytes  # NAME=VALUE

# A new /proc that shows only what is started inside; nothing inside outlives `unshare`.
_NAMESPACE = ("--pid", "--fork", "--mount-proc", "--kill-child")
_AS_ORDINARY_USER = ("--user", "--map-current-user")


@cache
def isolation_prefix() -> tuple[str, ...]:
    """Return a prefix with which a command sees no process but its own; nothing if the system cannot do that."""
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
    """Return the names of the variables whose assignment a file holds."""
    content = file.read_bytes()
    return sorted({each.partition(b"=")[0].decode(errors="replace") for each in assignments if each in content})

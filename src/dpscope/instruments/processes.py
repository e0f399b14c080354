"""Other programs, run with a time limit. They are ended with all their children, also when this process dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dpscope.vocabulary.statuses import ORPHANED

DRAIN_SECONDS = 5.0  # not for ever: a daemon that the command leaves behind may hold its output

LIFELINE = "DPSCOPE_LIFELINE"  # environment variable: which pipe on standard input is the lifeline

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class FinishedCommand:
    """Ending of a command, and what it printed, both streams together."""

    returncode: int
    output: str
    timed_out: bool = False


def run_limited(
    command: Sequence[str],
    *,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: OnLine = lambda line: None,
) -> FinishedCommand:
    """Run a command and report its lines as they come. After `limit` seconds it is killed with all its children.

    It sees only the variables of `environment` if that is given. Its standard input is a pipe without a writer that
    closes when this process dies (`end_with_lifeline`).
    """
    lifeline, held = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            stdin=lifeline,
            env={**(os.environ if environment is None else environment), LIFELINE: str(os.fstat(lifeline).st_ino)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        os.close(held)
        return FinishedCommand(127, f"{command[0]}: {error.strerror}")
    finally:
        os.close(lifeline)
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process.stdout, lines, on_line), daemon=True)
    reader.start()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        timed_out = process.returncode is None
        if timed_out:
            end_with_descendants(process.pid)
            process.wait()
        os.close(held)
    reader.join(DRAIN_SECONDS)
    return FinishedCommand(process.returncode, "".join(lines), timed_out)


def _read(stream: IO[str], lines: list[str], on_line: OnLine) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            on_line(line)


def end_with_descendants(pid: int) -> None:
    """Kill a process and all its children. The process is stopped first, so that it starts no new ones meanwhile.

    It stays in this process's group, so that ending the group ends it too.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for child in _children(pid):
        end_with_descendants(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(stat.parent.name))
    return children


def end_with_lifeline() -> None:
    """End this process when the one that called `run_limited` is gone."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(ORPHANED)

    if os.environ.get(LIFELINE) == str(os.fstat(0).st_ino):  # our parent may have given us another
        threading.Thread(target=wait, daemon=True).start()

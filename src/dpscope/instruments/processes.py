"""Other programs: where Nsight is installed, what it says, and runs with a time limit.

Programs are ended with all their children, also when this process dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
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
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(stat.parent.name))
    for child in children:
        end_with_descendants(child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_with_lifeline() -> None:
    """End this process when the one that called `run_limited` is gone."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(ORPHANED)

    if os.environ.get(LIFELINE) == str(os.fstat(0).st_ino):  # our parent may have given us another
        threading.Thread(target=wait, daemon=True).start()


ROOT = Path("/")
_UNKNOWN_OPTION = re.compile(r"unrecogni[sz]ed option '?(--[\w-]+)")


def newest(patterns: Iterable[str], folders: Iterable[Path] | None = None) -> str | None:
    """Return the newest file that the first successful pattern finds. Patterns are relative to `folders`, or to /."""
    found = (list(folder.glob(pattern)) for folder in folders or (ROOT,) for pattern in patterns)
    return next((str(max(paths, key=_version)) for paths in found if paths), None)


def _version(path: Path) -> tuple[list[tuple[int, ...]], Path]:
    """Return the numbers in each part of a path: cuda-12.4 is newer than cuda-9.2, 2025.1.1 than 2025.1."""
    return [tuple(map(int, re.findall(r"\d+", part))) for part in path.parts], path


def ask(*command: str) -> str:
    """Return what a command prints within 30 seconds on both streams; nothing if it cannot be run."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def find_version(output: str, numbers: int) -> str | None:
    """Find `2025.3.1` (with three `numbers`) in "Version 2025.3.1.0 (build …)"."""
    match = re.search(rf"[Vv]ersion\s+(\d+(?:\.\d+){{1,{numbers - 1}}})", output)
    return match.group(1) if match else None


def find_remedy(output: str, remedies: Mapping[str, str]) -> str | None:
    """Return the sentence of the first pattern that is found in what a tool printed."""
    return next((sentence for pattern, sentence in remedies.items() if re.search(pattern, output)), None)


def unknown_option(output: str) -> str | None:
    """Return the option that this version of the tool refuses, by its message; None if it refuses none."""
    match = _UNKNOWN_OPTION.search(output)
    return match.group(1) if match else None

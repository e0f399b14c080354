"""Common parts of Nsight Compute and Nsight Systems: where they are installed, and how their messages are read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

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

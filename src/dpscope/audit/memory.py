"""Memory of the host: how much is free, and how to release unused memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path


def release_memory() -> None:
    """Free reference cycles (engines and their models form some), and return freed memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: it keeps what was freed otherwise
        if trim is not None:
            trim(0)


def free_memory() -> int | None:
    """Return the bytes that this process can still take, by the system and its control group; None if unknown."""
    found = [_kilobytes("/proc/meminfo", "MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _number(limit), _number(used)
        found.append(None if most is None or now is None else max(0, most - now))
    return min((each for each in found if each is not None), default=None)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _kilobytes(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)

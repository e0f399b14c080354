"""Files that `run_on_gpu.sh` left: they lie in the newest `*-h200-tutorials` of `benchmarks/results/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sweeps import RESULTS

PROGRESS = "[1/1] ["  # of nsys, line by line
NOT_RECORDED = "not recorded: run tutorials/programs/run_on_gpu.sh on a GPU"


def folder() -> Path | None:
    return max(RESULTS.glob("*-h200-tutorials"), default=None)


def kept(name: str) -> Path | None:
    path = (folder() or RESULTS) / "recorded" / name
    return path if path.is_file() and path.stat().st_size else None


def output(command: str, *, first: int = 0, last: int | None = None) -> str:
    """Return what a command of gpu_commands.txt printed on the H200, by its name; lines `first` to `last`."""
    path = (folder() or RESULTS) / "output" / f"{command}.txt"
    if not path.is_file():
        return NOT_RECORDED
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(PROGRESS)]
    return "\n".join(lines[first:last])


def read_json(name: str) -> Any:
    path = kept(name)
    return json.loads(path.read_text(encoding="utf-8")) if path else None

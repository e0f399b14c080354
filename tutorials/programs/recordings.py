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


_OLD = {  # TEMPORARY
    "case_1-a.json": "memory_bound-two_operators.json",
    "case_1-b.json": "memory_bound-one_operator.json",
    "case_2-a.json": "launch_bound-loop.json",
    "case_2-b.json": "launch_bound-foreach.json",
    "case_2-c.json": "launch_bound-graph.json",
    "case_3-a.json": "unpinned_copy-unpinned.json",
    "case_3-b.json": "unpinned_copy-pinned.json",
    "case_3-c.json": "unpinned_copy-prefetched.json",
    "case_4-a.json": "hidden_sync-norms_read_at_once.json",
    "case_4-b.json": "hidden_sync-norms_kept_on_device.json",
    "case_5-a.json": "compute_bound-float32.json",
    "case_5-b.json": "compute_bound-bfloat16.json",
    "addition.details.csv": "memory_bound.details.csv",
    "addition.raw.csv": "memory_bound.raw.csv",
    "product.details.csv": "compute_bound.details.csv",
    "product.raw.csv": "compute_bound.raw.csv",
    "case_4.sqlite": "hidden_sync.sqlite",
    "case_2.sqlite": "launch_bound.sqlite",
    "case_3.sqlite": "unpinned_copy.sqlite",
    "case_3_c.sqlite": "prefetched_copy.sqlite",
    "traces/case_4-a/trace.json.gz": "traces/hidden_sync-norms_read_at_once/trace.json.gz",
    "traces/case_2-a/trace.json.gz": "traces/launch_bound-loop/trace.json.gz",
    "traces/case_4-b/trace.json.gz": "traces/hidden_sync-norms_kept_on_device/trace.json.gz",
}


def kept(name: str) -> Path | None:
    path = (folder() or RESULTS) / "recorded" / name
    if not path.is_file():
        path = (
            path.with_name(Path(_OLD.get(name, name)).name)
            if "traces" not in name
            else path.parents[2] / _OLD.get(name, name)
        )
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

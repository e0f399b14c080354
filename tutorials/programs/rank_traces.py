"""Start ranks on this machine, and read where collectives lie in their traces."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COLLECTIVES = ("gloo:", "nccl:")


def start(out: Path, *options: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run ranks.py on several ranks of this machine's CPU and return what each wrote down."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(HERE / "ranks.py")]
    quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ran = subprocess.run(
        [*command, *options, "--out", str(out)], env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"The ranks ended with {ran.returncode}. Their last words: {ran.stderr[-800:]}")
    parallel = options[options.index("--parallel") + 1] if "--parallel" in options else "ddp"
    return [json.loads((out / f"{parallel}-rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the timed events of the last step of a rank's trace, in milliseconds from its beginning."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    step = [e for e in events if e["name"] == "step" and e.get("cat") == "user_annotation"][-1]
    inside = [e for e in events if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    return [
        {"name": e["name"], "kind": e.get("cat"), "start": (e["ts"] - step["ts"]) / 1e3, "ms": e["dur"] / 1e3}
        for e in inside
    ]


def phases_and_collectives(path: Path) -> list[tuple[str, str, float, float]]:
    """Return phases and collectives of a rank's last step: track, name, start, length in ms."""
    wanted = ("load the batch", "forward", "backward", "optimizer")
    found = []
    for event in events_of(path):
        if event["name"] in wanted and event["kind"] == "user_annotation":
            found.append(("phases", event["name"], event["start"], event["ms"]))
        elif event["name"].startswith(COLLECTIVES) and "barrier" not in event["name"]:
            found.append(("collectives", event["name"], event["start"], event["ms"]))
    return sorted(found, key=lambda event: (event[0] != "phases", event[2]))


def overlapped(path: Path) -> tuple[float, float]:
    """Return the milliseconds of collectives in a step, and how many of them lie within the backward pass."""
    events = phases_and_collectives(path)
    begin, length = next((start, ms) for _, name, start, ms in events if name == "backward")
    total = inside = 0.0
    for track, _, start, ms in events:
        if track == "collectives":
            total += ms
            inside += max(0.0, min(start + ms, begin + length) - max(start, begin))
    return total, inside

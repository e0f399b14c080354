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


def start(out: Path, ranks: int = 2) -> dict[str, list[dict[str, Any]]]:
    """Run all that lesson 6 shows on several ranks of this machine's CPU; return what each rank wrote down, by run."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(HERE / "ranks.py")]
    quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    options = ["--lesson", "--out", str(out)]
    ran = subprocess.run([*command, *options], env=os.environ | quiet, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"The ranks ended with {ran.returncode}. Their last words: {ran.stderr[-800:]}")
    return {
        folder.name: [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-rank*.json"))]
        for folder in sorted(out.iterdir())
    }


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


TRACKS = ("phases", "computing", "collectives")


def tracks(path: Path) -> list[tuple[str, str, float, float]]:
    """Return phases, operators and collectives of a rank's last step: track, name, start, length in ms."""
    wanted = ("load the batch", "forward", "backward", "optimizer")
    found, ended = [], 0.0
    for event in sorted(events_of(path), key=lambda event: float(event["start"])):
        name, span = event["name"], (event["start"], event["ms"])
        if name in wanted and event["kind"] == "user_annotation":
            found.append(("phases", name, *span))
        elif name.startswith(COLLECTIVES) and "barrier" not in name:
            found.append(("collectives", name, *span))
        elif name.startswith("aten::") and event["start"] >= ended:  # inside another it is part of it
            ended = event["start"] + event["ms"]
            found.append(("computing", name, *span))
    return sorted(found, key=lambda event: (TRACKS.index(event[0]), event[2]))


def overlapped(path: Path) -> tuple[float, float]:
    """Return the milliseconds of collectives in a step, and in how many of them this rank computed meanwhile."""
    spans = {track: [(start, start + ms) for on, _, start, ms in tracks(path) if on == track] for track in TRACKS}
    total = sum(end - start for start, end in spans["collectives"])
    both = sum(
        max(0.0, min(end, ended) - max(start, began))
        for start, end in spans["collectives"]
        for began, ended in spans["computing"]
    )
    return total, both

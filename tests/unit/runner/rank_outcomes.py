"""Ranks of a row that leave what a test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpscope.instruments.processes import FinishedCommand
from dpscope.instruments.timing import Timing
from dpscope.runner import ranks
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS

TINY = PRESETS["tiny"]


def spec(**more: Any) -> RunSpec:
    values = {"method": "flash", "batch_size": 2, "seq_len": 8, "warmup": 1, "steps": 2, "gpus": 2, **more}
    return RunSpec(workload=TINY, **values)


def figures(times: list[float], peak: int) -> dict[str, Any]:
    memory = {"source": "made up", "peak_bytes": peak}
    moved = {"all-reduce": {"calls": 3, "bytes": 10**9, "sent_bytes": 10**9}}
    share = times[0] / 100
    return {
        "timing": Timing(times).to_dict(),
        "memory": memory,
        "collectives": moved,
        "collective_share": share,
        "notes": [],
    }


def left_by_ranks(monkeypatch: pytest.MonkeyPatch, *outcomes: dict[str, Any] | None, output: str = "") -> None:
    def run(command: list[str], **options: Any) -> FinishedCommand:
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                (Path(command[-1]) / f"{rank}.json").write_text(json.dumps(outcome))
        return FinishedCommand(0, output)

    monkeypatch.setattr(ranks, "run_limited", run)


def ok(times: list[float], peak: int) -> dict[str, Any]:
    return {"status": "ok", "reason": None, "figures": figures(times, peak)}

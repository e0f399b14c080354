"""What a rank leaves for the process that started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpscope.errors import UserError
from dpscope.runner.measurements import time
from dpscope.runner.ranks import measure_or_explain_rank
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS

SPEC = RunSpec(workload=PRESETS["tiny"], method="flash", batch_size=2, gpus=2)


def test_a_rank_that_saw_something_leaves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(time, "measure_rank", lambda spec, files: {"spec": spec.method, "files": files})
    outcome = measure_or_explain_rank(SPEC, time.__name__, tmp_path)
    assert outcome == {"status": "ok", "reason": None, "figures": {"spec": "flash", "files": tmp_path}}


def test_a_rank_that_failed_leaves_its_status_and_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(spec: RunSpec, files: Path) -> None:
        raise UserError("no such thing")

    monkeypatch.setattr(time, "measure_rank", refuse)
    outcome = measure_or_explain_rank(SPEC, time.__name__, tmp_path)
    assert outcome == {"status": "skipped", "reason": "no such thing", "figures": None}

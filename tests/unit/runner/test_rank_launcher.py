"""Whoever failed speaks for a row of several processes."""

from __future__ import annotations

from typing import Any

import pytest

from dpscope.runner.measure import measure_or_explain
from tests.unit.runner.rank_outcomes import left_by_ranks, ok, spec


def test_a_rank_that_failed_speaks_for_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"status": "failed", "reason": "another process has ended", "figures": None}
    left_by_ranks(monkeypatch, lost, {"status": "oom", "reason": "out of GPU memory", "figures": None})
    result = measure_or_explain(spec())
    assert (result.status, result.reason) == ("oom", "rank 1: out of GPU memory")


def test_a_rank_that_left_nothing_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_ranks(monkeypatch, ok([1.0, 1.0], 1), None)
    result = measure_or_explain(spec())
    assert result.status == "failed"
    assert "rank 1 ended without a result" in str(result.reason)


# As torch.distributed.run printed it when rank 1 was killed.
KILLED = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 25752)  (SIGTERM)
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 25753)
"""


@pytest.mark.parametrize("other", [None, {"status": "failed", "reason": "Connection reset by peer", "figures": None}])
def test_a_rank_that_was_killed_is_named_before_those_that_lost_it(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any] | None
) -> None:
    left_by_ranks(monkeypatch, other, None, output=KILLED)
    result = measure_or_explain(spec())
    assert result.status == "failed"
    assert str(result.reason).startswith("rank 1: the process was ended by SIGKILL")

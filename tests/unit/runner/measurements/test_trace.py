"""Steps of several processes are recorded on rank 0, or on all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpscope.results.payloads.trace import TracePayload
from dpscope.results.schema import find_mismatch
from dpscope.runner.measure import measure_or_explain
from dpscope.runner.measurements import trace
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS
from tests.unit.flash.ranks.world import FSDP_OR_DDP, in_world

SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 8, "warmup": 1, "gpus": 2, "parallel": FSDP_OR_DDP}
SPEC = RunSpec(workload=PRESETS["tiny"], method="flash", instrument="trace", options={"trace_steps": 1}, **SIZES)
ALL = replace(SPEC, options={**SPEC.options, "rank": "all"})


def both(folder: Path) -> list[trace.TracedSteps]:
    return [trace.measure_rank(SPEC, folder / "first"), trace.measure_rank(ALL, folder / "all")]


@pytest.mark.slow
def test_ranks_are_recorded_as_asked_and_collectives_are_a_kind_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rank = in_world(2, both, tmp_path)
    results = {}
    for spec, place in ((SPEC, 0), (ALL, 1)):
        monkeypatch.setattr(trace, "run_ranks", lambda *_, place=place: [found[place] for found in by_rank])
        results[spec.option("rank")] = result = measure_or_explain(spec)
        assert result.ok, result.reason
        assert find_mismatch(result.trace, TracePayload) is None
        kinds = {each["collective"] for each in result.trace["collectives"]["kinds"]}
        assert kinds == {"all-gather", "all-reduce"}  # gloo's reduce-scatter is an all-reduce
    assert "ranks" not in results["0"].trace
    assert [each["rank"] for each in results["all"].trace["ranks"]] == [0, 1]
    assert all(0 < each["under_way_ms"] < each["step_ms"] for each in results["all"].trace["ranks"])
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gz"))
    assert written == [f"{name}/trace.json.gz" for name in ("all/rank-0", "all/rank-1", "first/rank-0")]

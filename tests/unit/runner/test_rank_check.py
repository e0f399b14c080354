"""A run on several ranks is held against that of one process."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.runner import ranks
from dpscope.runner.rank_check import CHECKED_STEPS, RankCheck, check_ranks, compare, share_of_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS
from tests.unit.flash.ranks.world import FSDP_OR_DDP
from tests.unit.two_ranks import fork_ranks

SPEC = RunSpec(workload=PRESETS["tiny"], method="flash", batch_size=2, seq_len=8, gpus=2, parallel=FSDP_OR_DDP)


@pytest.mark.parametrize("step", range(CHECKED_STEPS))
def test_every_sample_is_on_one_rank_and_some_steps_leave_ranks_empty(step: int) -> None:
    shares = [share_of_step(step, 7, rank, 3) for rank in range(3)]
    assert Counter(sum(shares, [])) == Counter(range(7))  # noqa: RUF017
    assert ([] in shares) == (step % 2 == 1)


def test_a_parameter_that_is_not_where_one_process_puts_it_is_named() -> None:
    before = {"a": torch.zeros(3), "b": torch.zeros(2)}
    expected = {"a": torch.ones(3), "b": torch.full((2,), 2.0)}
    result = RankCheck(SPEC, "fp32", 1e-4)
    assert compare(result, before, expected, expected).ok
    found = compare(result, before, expected, {"a": expected["a"], "b": expected["b"] + torch.tensor([0.0, 1e-3])})
    assert not found.ok
    assert found.parameter == "b"
    assert "NOT the parameters of one process" in str(found)


@pytest.mark.slow
def test_the_command_heeds_methods_number_format_tolerance_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that cannot run over ranks says so, and one that is asked for is the one that runs.

    Ranks are copies of this process; the test below starts real ones.
    """

    def run(command: list[str]) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", command[-5:])
        fork_ranks(ranks.main)
        return SimpleNamespace(output="")

    monkeypatch.setattr(ranks, "run_limited", run)
    monkeypatch.setattr(ranks, "end_with_lifeline", lambda: None)
    file = tmp_path / "ranks.json"
    options = ["--seq-len", "8", "--batch-size", "2", "--gpus", "2", "--parallel", "ddp", "--device", "cpu"]
    asked = ["--methods", "flash,flat", "--dtype", "fp64", "--tolerance", "1e-9", "--json", str(file)]
    ended = CliRunner().invoke(main, ["check", "--model", "tiny", *options, *asked])
    found = json.loads(file.read_text())
    by_method = {each["method"]: each for each in found["methods"]}
    assert by_method.keys() == {"flash", "flat"} and found["ranks"] == 2
    assert by_method["flash"]["ok"] and by_method["flash"]["difference"] < 1e-12
    assert {(each["dtype"], each["tolerance"]) for each in found["methods"]} == {("fp64", 1e-9)}
    assert ended.exit_code == (0 if found["ok"] else 1)


def test_what_is_of_one_process_alone_is_refused_over_ranks() -> None:
    ended = CliRunner().invoke(main, ["check", "--model", "tiny", "--gpus", "2", "--paths", "--device", "cpu"])
    assert ended.exit_code == 2 and "--paths is of a check in one process" in ended.output


@pytest.mark.slow
def test_two_real_ranks_give_the_parameters_of_one_process() -> None:
    found = check_ranks(SPEC)
    assert found.ok, str(found)

"""A run on several ranks is held against that of one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dpscope.runner.rank_check import CHECKED_STEPS, check_ranks, compare, share_of_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import PRESETS
from tests.unit.flash.ranks.world import FSDP_OR_DDP

SPEC = RunSpec(workload=PRESETS["tiny"], method="flash", batch_size=2, seq_len=8, gpus=2, parallel=FSDP_OR_DDP)


@pytest.mark.parametrize("step", range(CHECKED_STEPS))
def test_every_sample_is_on_one_rank_and_some_steps_leave_ranks_empty(step: int) -> None:
    shares = [share_of_step(step, 7, rank, 3) for rank in range(3)]
    assert Counter(sum(shares, [])) == Counter(range(7))  # noqa: RUF017
    assert ([] in shares) == (step % 2 == 1)


def test_a_parameter_that_is_not_where_one_process_puts_it_is_named() -> None:
    before = {"a": torch.zeros(3), "b": torch.zeros(2)}
    expected = {"a": torch.ones(3), "b": torch.full((2,), 2.0)}
    assert compare(SPEC, before, expected, expected).ok
    found = compare(SPEC, before, expected, {"a": expected["a"], "b": expected["b"] + torch.tensor([0.0, 1e-3])})
    assert not found.ok
    assert found.parameter == "b"
    assert "NOT the parameters of one process" in str(found)


@pytest.mark.slow
def test_two_real_ranks_give_the_parameters_of_one_process() -> None:
    found = check_ranks(SPEC)
    assert found.ok, str(found)

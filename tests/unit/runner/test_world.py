"""The process group of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import join_world
from dpscope.workloads.configs import PRESETS

ALONE = RunSpec(workload=PRESETS["tiny"], method="standard", batch_size=2, seq_len=8)


def test_a_row_of_one_process_joins_nothing() -> None:
    assert join_world(ALONE) == 0
    assert not dist.is_initialized()


def test_in_a_simulated_world_nobody_else_is_there() -> None:
    try:
        assert join_world(replace(ALONE, simulate_world=8)) == 0
        assert dist.get_world_size() == 8
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("change", [{"gpus": 2, "simulate_world": 2}, {"gpus": 3, "parallel": "hsdp"}, {"gpus": 0}])
def test_worlds_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError):
        replace(ALONE, **change)

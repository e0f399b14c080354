"""Checkpoints of torch.distributed.checkpoint cross world sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.flash.ranks.world import STEPS, assert_same


@pytest.mark.slow
def test_a_run_saved_by_four_ranks_goes_on_with_two_as_if_one_process_had_done_all(
    worlds: dict[int, Any], alone: dict[str, Any]
) -> None:
    for found in worlds[2]:
        for (_way, optimizer), (parameters, steps) in found["load"].items():
            assert_same(parameters, alone[optimizer])
            assert steps == len(STEPS)

"""What one rank refuses, all refuse, with its name."""

from __future__ import annotations

from typing import Any

import pytest

from dpscope.flash.ranks.agreement import LostRank, naming_lost_ranks
from tests.unit.flash.ranks import cases
from tests.unit.flash.ranks.world import in_world


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_differ_are_refused_on_all_of_them(worlds: dict[int, Any], size: int) -> None:
    expected = {
        "one rank's arguments": "max_grad_norm",
        "noise": "not about to do the same step",
        "frozen": "ranks 0 and 1 differ in the model: 'head.weight",
        "made-up samples": "rand_on_empty",
    }
    if size == 4:
        expected["submesh"] = "over 2 of 4 processes"
    for rank, found in enumerate(worlds[size]):
        assert found["refusals"].keys() == expected.keys()
        for name, words in expected.items():
            assert words in found["refusals"][name]
        assert rank == 0 or found["refusals"]["one rank's arguments"].startswith("rank 0: ")


@pytest.mark.slow
def test_when_a_rank_is_killed_the_others_end_with_a_sentence() -> None:
    ((said, seconds),) = in_world(2, cases.killed, lost=[1])
    assert "another process has ended or cannot be reached" in said
    assert seconds < 30


def test_a_collective_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    words = "rank 3 could not go on adding up: .*Connection closed"
    with pytest.raises(LostRank, match=words), naming_lost_ranks("adding up"):
        raise RuntimeError("Connection closed by peer\nat pair.cc")

"""What one rank refuses, all refuse, with its name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dpscope.flash.ranks.agreement import LostRank, explain_lost_ranks, naming_lost_ranks
from tests.torch_here import CAN_SHARD, takes_shards
from tests.unit.flash.ranks import cases
from tests.unit.flash.ranks.world import in_world


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_differ_are_refused_on_all_of_them(worlds: dict[int, Any], size: int) -> None:
    expected = {
        "one rank's arguments": "max_grad_norm",
        "noise": "not about to do the same step",
        "bound": "not about to do the same step",
        "plateau": "learning rates (added up)",
        "a share skipped": "an empty share is trained on, too, and never skipped",
        "frozen": "ranks 0 and 1 differ in the model: 'head.weight",
        "order of parameters": "ranks 0 and 1 differ in the optimizer (its options, or the order of its parameters): '",
        "learning rate": "'group 0: lr=0.5' and 'group 0: lr=1.5'",
        "length of the data": "'40 samples' and '39 samples'",
        "made-up samples": "rand_on_empty",
    }
    if size == 4 and CAN_SHARD:
        expected["submesh"] = "over 2 of 4 processes"
    for rank, found in enumerate(worlds[size]):
        assert found["refusals"].keys() == expected.keys()
        for name, words in expected.items():
            assert words in found["refusals"][name]
        assert rank == 0 or found["refusals"]["one rank's arguments"].startswith("rank 0: ")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=takes_shards)])
def test_when_a_rank_is_killed_the_others_end_with_a_sentence(way: str) -> None:
    ((said, seconds),) = in_world(2, cases.killed, way, lost=[1])
    assert "another process has ended or cannot be reached" in said
    assert seconds < 30


def test_an_error_of_other_collectives_that_ends_the_process_is_followed_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr(sys, "excepthook", lambda *error: print("a traceback", file=sys.stderr))
    explain_lost_ranks()
    explain_lost_ranks()
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    sys.excepthook(RuntimeError, lost, None)
    assert capsys.readouterr().err.splitlines() == [
        "a traceback",
        "dpscope: rank 3 ends: another process has ended or cannot be reached; look for the first error of the others",
    ]
    sys.excepthook(RuntimeError, RuntimeError("shapes differ"), None)
    assert capsys.readouterr().err == "a traceback\n"


def test_a_collective_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    words = "rank 3 could not go on adding up: .*Connection closed"
    with pytest.raises(LostRank, match=words), naming_lost_ranks("adding up"):
        raise RuntimeError("Connection closed by peer\nat pair.cc")

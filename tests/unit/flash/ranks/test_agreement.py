"""What one rank refuses, all refuse, with its name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dpscope.flash.ranks.agreement import LostRank, naming_lost_ranks
from tests.torch_here import CAN_SHARD, takes_shards
from tests.unit.flash.ranks import cases
from tests.unit.flash.ranks.world import in_world


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_differ_are_refused_on_all_of_them(worlds: dict[int, Any], size: int) -> None:
    expected = {
        "one rank's arguments": "max_grad_norm",
        "noise": "differ in the standard deviation of the noise: 0.3 and 0.6",
        "bound": "differ in the clipping bound: 0.3 and 0.6",
        "plateau": "differ in lr of group 0: 0.5 and 0.05",
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
def test_ranks_that_do_not_do_the_same_in_training_are_told_so_and_none_waits(worlds: dict[int, Any]) -> None:
    expected = {
        "learning rates swapped": "differ in lr of group 0: 0.5 and 0.25",
        "learning rate as a tensor": "differ in lr of group 1: 0.25 and 0.3",
        "weight decay": "differ in weight_decay of group 0: 0 and 0.1",
        "noise used before": "differ in the noise of earlier steps",
        "clipping": "differ in the arguments of make_private: 'clipping=flat' and 'clipping=automatic'",
        "rows_per_sample": "differ in the arguments of make_private: 'rows_per_sample=1' and 'rows_per_sample=2'",
        "weights loaded": "differ in states loaded into the model or the optimizer since make_private: 0 and 1",
        "an optimizer's state loaded": "states loaded into the model or the optimizer since make_private: 0 and 1",
        "other weights loaded": "ranks 0 and 1 hold different values of embed.weight",
        "other blocks frozen": "blocks.1.norm.weight, blocks.1.norm.bias, blocks.1.up.weight and 3 more is trained on "
        "rank 0 and not on rank 1",
        "another model": "differ in the number of the model",
        "more backward passes": "rank 0 is about to take step 1, and rank 1 to ",
        "a look at the loader": "and rank 1 to draw the batches of epoch 2",
        "an epoch left early": "and rank 1 to draw the batches of epoch 2",
        "its own error caught": "",
        "a user on two ranks": "ranks 0 and 1 both have rows of sample 7",
        "a user in two batches": "sample 1 has rows in two batches of one step",
        "a physical batch skipped": "batches that BatchMemoryManager drew and the loop did not train on: 0 and 1",
        "initialised differently": "ranks 0 and 1 hold different values of blocks.0.up.weight",
    }
    for found in worlds[2]:
        said = found["disagreements"]
        assert {name for _, name in said} == expected.keys() - (set() if CAN_SHARD else {"initialised differently"})
        for (way, name), message in said.items():
            assert message and expected[name] in message, (way, name, message)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=takes_shards)])
def test_when_a_rank_is_killed_the_others_end_with_a_sentence(way: str) -> None:
    ((said, seconds),) = in_world(2, cases.killed, way, lost=[1])
    assert "another process has ended or cannot be reached" in said
    assert seconds < 30


def test_importing_and_training_leave_the_hook_for_errors_alone() -> None:
    assert not sys.excepthook.__module__.startswith("dpscope")  # torch's own init_process_group sets one


def test_a_rank_that_does_not_come_is_not_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    with pytest.raises(LostRank, match=r"did not come to the same point.*left its loop early"), naming_lost_ranks("on"):
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")


def test_a_collective_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    words = "rank 3 could not go on adding up: .*Connection closed"
    with pytest.raises(LostRank, match=words), naming_lost_ranks("adding up"):
        raise RuntimeError("Connection closed by peer\nat pair.cc")

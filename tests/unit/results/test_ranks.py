"""What a result over several processes says of its ranks."""

from __future__ import annotations

from dataclasses import replace

from dpscope.results.derived import ranks_in
from tests.unit.rank_payloads import MEASURED, SIMULATED


def test_it_names_its_slowest_rank_its_largest_and_what_travels(make_result):
    found = ranks_in(replace(make_result(gpus=2), ranks=MEASURED))
    assert (found.world_size, found.slowest, found.largest) == (2, 1, 0)
    assert list(found.bytes.items()) == [("all-gather", 8 << 20), ("reduce-scatter", 2 << 20)]
    assert (found.collective_bytes, found.sent_bytes) == (10 << 20, 5 << 20)
    assert found.share == 0.25  # of the rank that waits least
    assert found.with_sending(30.0) is None  # what was measured has it already


def test_collectives_without_a_place_of_their_own_follow_by_name(make_result):
    moved = {"calls": 1, "bytes": 1, "sent_bytes": 1}
    names = ("send", "broadcast", "all-to-all", "all-gather")
    found = ranks_in(replace(make_result(gpus=2), ranks={**MEASURED, "collectives": dict.fromkeys(names, moved)}))
    assert list(found.bytes) == ["all-gather", "broadcast", "all-to-all", "send"]


def test_a_simulated_step_with_sending_is_between_all_of_it_hidden_and_none(make_result):
    found = ranks_in(replace(make_result(simulate_world=8), ranks=SIMULATED))
    assert found.with_sending(40.0) == (40.0, 50.0)
    assert found.with_sending(4.0) == (10.0, 14.0)  # sending takes longer than all computing
    assert found.with_sending(None) is None
    assert (found.world_size, found.share) == (8, None)


def test_a_result_of_one_process_has_no_ranks(make_result):
    assert ranks_in(make_result()) is None
    assert ranks_in(replace(make_result(gpus=2), ranks={**MEASURED, "time_ms": []})) is None

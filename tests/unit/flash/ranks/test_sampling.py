"""Poisson sampling over ranks is that of one process, split."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash.ranks.sampling import ABSENT_SAMPLE, PresentSamples, share_of
from tests.unit.flash.ranks import cases
from tests.unit.flash.ranks.world import assert_same


@pytest.mark.parametrize("drawn", range(9))
def test_shares_are_equally_long_and_hold_every_drawn_sample_once(drawn: int) -> None:
    shares = [share_of(range(drawn), rank, 4) for rank in range(4)]
    assert len({len(share) for share in shares}) == 1
    assert Counter(index for share in shares for index in share if index != ABSENT_SAMPLE) == Counter(range(drawn))


def test_absent_samples_are_left_out_where_a_batch_is_read() -> None:
    data = PresentSamples(TensorDataset(torch.arange(5)))
    batches = DataLoader(data, batch_sampler=[[1, ABSENT_SAMPLE], [ABSENT_SAMPLE, 4, 3]])
    assert [batch[0].tolist() for batch in batches] == [[1], [4, 3]]
    assert len(data) == 5
    assert data.tensors[0].tolist() == list(range(5))  # the data set's own attributes are there


def whole_draws(shares: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(chain.from_iterable(draw)) for draw in zip(*shares, strict=True)]


@pytest.mark.slow
def test_poisson_batches_train_as_in_one_process_with_its_accounting(worlds: dict[int, Any]) -> None:
    parameters, sizes, epsilon = cases.poisson("alone")
    for way, found in worlds[4][0]["poisson_ways"].items():
        assert_same(found[0], parameters)
        assert found[2] == epsilon
        if way != "physical":
            shares = zip(*(rank["poisson_ways"][way][1] for rank in worlds[4]), strict=True)
            assert [sum(share) for share in shares] == sizes


@pytest.mark.slow
def test_all_ranks_run_equally_many_physical_batches(worlds: dict[int, Any]) -> None:
    sizes = [rank["poisson_ways"]["physical"][1] for rank in worlds[4]]
    assert len({len(each) for each in sizes}) == 1
    assert max(max(each) for each in sizes) <= 2
    assert any(0 in each for each in sizes)


@pytest.mark.slow
def test_padded_batches_train_as_in_one_process_without_padding(worlds: dict[int, Any]) -> None:
    parameters, _, epsilon = cases.poisson("alone")
    for way, found in worlds[4][0]["padded_ways"].items():
        assert_same(found[0], parameters)
        assert found[2] == epsilon
        sizes = [rank["padded_ways"][way][1] for rank in worlds[4]]
        assert all(each == sizes[0] and 0 not in each for each in sizes)
    assert set(sizes[0]) == {2}


@pytest.mark.slow
def test_a_thousand_draws_have_a_step_on_every_rank_with_empty_shares(worlds: dict[int, Any]) -> None:
    draws = [rank["thousand_draws"] for rank in worlds[4]]
    assert [len(each) for each in draws] == [1000] * 4
    assert all([] in each for each in draws)
    assert whole_draws(draws) == whole_draws([rank["thousand_draws"] for rank in worlds[2]])

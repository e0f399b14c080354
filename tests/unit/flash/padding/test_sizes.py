"""Sizes follow from the distribution of draws: few of them, all seen early, little padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dpscope.errors import UserError
from dpscope.flash.padding.loader import BATCH_COST, Sizes, SizesInTurn, binomial, given_sizes, poisson_sizes


@pytest.mark.parametrize(("samples", "seed"), [(6_400, 0), (6_400, 1), (10**6, 2), (640, 3), (130, 4)])
def test_200_draws_of_64_have_four_sizes_none_of_them_new_after_the_tenth_and_a_twentieth_of_padding(samples, seed):
    draws = np.random.default_rng(seed).binomial(samples, 64 / samples, 200)
    in_turn = SizesInTurn(poisson_sizes(samples, 64 / samples))
    cuts = [in_turn.cut(int(draw)) for draw in draws]
    early, late = (set(itertools.chain(*part)) for part in (cuts[:10], cuts[10:]))
    assert len(early) <= 4 and late <= early
    rows = sum(map(sum, cuts))
    assert rows - draws.sum() <= 0.05 * rows
    assert sum(map(len, cuts)) <= 1.4 * len(draws)


@pytest.mark.parametrize("mean", [0.3, 1, 5, 64, 1000, 20_000])
def test_the_share_of_padding_is_what_was_expected(mean):
    sizes = poisson_sizes(10**6, mean / 10**6)
    draws = np.random.default_rng(0).binomial(10**6, mean / 10**6, 2000)
    rows = sum(sum(sizes.cut(int(draw))) for draw in draws)
    assert 1 - draws.sum() / rows == pytest.approx(sizes.expected_share, abs=0.02)
    assert len(sizes.sizes) <= 4


def test_chosen_sizes_cost_little_more_than_the_best_of_all_sizes():
    """Against all sets of four from 5 to 22, cut in all ways, for draws of 16 from 1,600."""
    masses = binomial(1600, 0.01)[:40]

    def cost(sizes):
        cuts = [sizes.cut(n) for n in range(len(masses))]
        return masses @ [sum(cut) + BATCH_COST * 16 * (len(cut) - 1) for cut in cuts]

    best = min(cost(Sizes(sizes)) for sizes in itertools.combinations(range(5, 23), 4))
    assert cost(poisson_sizes(1600, 0.01)) <= 1.02 * best


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 64), (17, 58, 64, 71)])
def test_every_draw_is_held_by_its_batches_with_less_than_one_to_spare(sizes):
    sizes = Sizes(sizes)
    for count in range(500):
        cut = sizes.cut(count)
        assert set(cut) <= set(sizes.sizes)
        assert count <= sum(cut) <= count + sizes.sizes[-1]
        assert count > sum(cut[:-1]) or len(cut) == 1


def test_one_size_cuts_a_draw_into_equal_batches():
    assert given_sizes(32).cut(70) == [32, 32, 32]
    assert given_sizes(32).cut(64) == [32, 32]
    assert given_sizes(32).cut(0) == [32]


def test_binomial_masses_are_those_of_the_distribution():
    masses = binomial(20, 0.3)
    assert masses.sum() == pytest.approx(1) and masses @ np.arange(21) == pytest.approx(6)
    assert masses[2] == pytest.approx(190 * 0.3**2 * 0.7**18)
    assert binomial(5, 1.0).tolist() == [0, 0, 0, 0, 0, 1]


def test_ranks_pad_their_shares():
    alone, of_four = poisson_sizes(6400, 0.01), poisson_sizes(6400, 0.01, ranks=4)
    assert max(of_four.sizes) < max(alone.sizes) / 3


def test_a_draw_of_always_the_same_size_is_not_padded():
    sizes = poisson_sizes(10, 1.0)
    assert sizes.sizes == (10,) and sizes.expected_share == 0


@pytest.mark.parametrize("sizes", [0, -1, [], [8, 0], [True], ["8"], [8.0]])
def test_what_is_no_size_is_refused(sizes):
    with pytest.raises(UserError, match="pad_batches="):
        given_sizes(sizes)

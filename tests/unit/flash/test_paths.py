"""The cost model: pure decisions from shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.flash.paths import DIRECT, GRAM, KEEP, RANK1, choose_path

SIZES = st.integers(1, 5000)


def test_one_sample_keeps_its_gradient():
    assert choose_path(1, 16384, 2048, 8192, itemsize=2).path == KEEP


def test_one_position_is_rank_one():
    assert choose_path(8, 1, 64, 64).path == RANK1


def test_short_sequences_of_wide_layers_take_the_gram_path():
    decision = choose_path(16, 256, 2048, 8192, itemsize=2)
    assert decision.path == GRAM
    assert "more memory" in decision.reason


def test_long_sequences_of_narrow_layers_keep_or_go_direct():
    assert choose_path(4, 16384, 64, 64, itemsize=2).path == KEEP
    assert choose_path(4, 16384, 64, 64, itemsize=2, memory_allowance=0.0).path == DIRECT


@given(batch=SIZES, length=SIZES, d=SIZES, p=SIZES, itemsize=st.sampled_from([2, 4, 8]))
def test_keeping_never_takes_more_memory_than_what_it_replaces_unless_allowed(batch, length, d, p, itemsize):
    decision = choose_path(batch, length, d, p, itemsize=itemsize)
    costs = decision.costs
    if decision.path == KEEP and batch > 1:
        assert costs[KEEP].bytes_held <= costs[GRAM].bytes_held
    if batch > 1 and length > 1:
        allowed = [GRAM, DIRECT] + [KEEP] * (costs[KEEP].bytes_held <= costs[GRAM].bytes_held)
        assert costs[decision.path].seconds == min(costs[name].seconds for name in allowed)


@pytest.mark.parametrize("path", [GRAM, DIRECT, KEEP])
def test_a_forced_path_is_taken_whatever_it_costs(path):
    assert choose_path(1, 1, 3, 5, forced=path).path == path


def test_an_unknown_path_is_refused_by_name():
    with pytest.raises(ValueError, match="'fast' is not one of gram, direct, keep"):
        choose_path(2, 2, 2, 2, forced="fast")


def test_operation_counts_follow_the_mathematics():
    costs = choose_path(2, 3, 5, 7).costs
    gemm = 2 * 2 * 3 * 5 * 7
    assert costs[KEEP].operations == gemm
    assert costs[DIRECT].operations == 2 * gemm
    assert costs[GRAM].operations == gemm + 2 * 3**2 * (5 + 7)

"""The allocator on paper does what torch's caching allocator does with the same requests."""

from __future__ import annotations

import pytest

from dpscope.forecast.allocator import Allocator, OutOfFakeMemory, Segments
from dpscope.forecast.cards import CARDS

MIB = 2**20


def test_sizes_are_rounded_and_segments_are_of_the_sizes_that_torch_takes():
    segments = Segments()
    segments.allocate(1)
    assert (segments.allocated, segments.reserved) == (512, 2 * MIB)
    segments.allocate(3 * MIB)
    assert segments.reserved == 22 * MIB
    segments.allocate(11 * MIB)  # what is left of the 20 MiB: 17
    assert segments.reserved == 22 * MIB
    segments.allocate(33 * MIB + 1)
    assert segments.reserved == 22 * MIB + 34 * MIB


def test_free_neighbours_are_merged_and_used_again():
    segments = Segments()
    blocks = [segments.allocate(5 * MIB) for _ in range(4)]
    for block in blocks:
        segments.free(block)
    segments.allocate(20 * MIB)
    assert segments.reserved == 20 * MIB
    assert segments.allocated == 20 * MIB


def test_a_block_between_two_keeps_them_apart():
    segments = Segments()
    first, _, third = (segments.allocate(6 * MIB) for _ in range(3))
    segments.free(first)
    segments.free(third)
    segments.allocate(11 * MIB)
    assert segments.reserved == 20 * MIB + 12 * MIB


def test_empty_segments_are_given_back_before_the_limit_is_an_error():
    segments = Segments(limit=64 * MIB)
    segments.free(segments.allocate(40 * MIB))
    segments.allocate(60 * MIB)
    assert segments.reserved == 60 * MIB
    with pytest.raises(OutOfFakeMemory):
        segments.allocate(10 * MIB)


def test_a_peak_that_begins_again_forgets_what_was_there_before():
    allocator = Allocator(CARDS["h200"])
    segments = allocator.segments
    segments.free(segments.allocate(1000 * MIB))  # a whole model, of which each process keeps a shard
    allocator.begin_again(None)
    segments.allocate(MIB)
    assert allocator.peak == segments.step_peak == segments.allocated

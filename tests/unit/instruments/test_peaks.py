"""Peak memory of a step on the CPU, to the byte."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscope.instruments.peaks import cpu_peak, peak_growth, storage_bytes
from dpscope.results.store import NO_ROOM

KB = 1024


def bytes_of(count):
    return torch.empty(count, dtype=torch.uint8)


def test_a_step_with_known_allocations_gives_its_exact_peak():
    def step():
        kept = bytes_of(5 * KB)
        first = bytes_of(10 * KB)  # 15 live
        del first  # 5 live
        second = bytes_of(7 * KB)  # 12 live
        third = bytes_of(4 * KB)  # 16 live: the peak
        del second
        del third
        return kept

    assert cpu_peak(step, [])["peak_bytes"] == 16 * KB


def test_an_odd_number_of_bytes_is_not_rounded():
    assert cpu_peak(lambda: bytes_of(4097), [])["peak_bytes"] == 4097


def test_what_was_live_before_the_step_is_counted_in_once():
    weights = torch.zeros(1000)
    peak = cpu_peak(lambda: -weights, [weights, weights.view(10, 100), weights[5:], torch.zeros(3)])
    assert peak["live_before_step_bytes"] == 4000 + 12
    assert peak["peak_bytes"] == 2 * 4000 + 12


def test_a_step_that_allocates_nothing_peaks_at_what_was_live():
    weights = torch.zeros(1000)
    assert cpu_peak(weights.neg_, [weights])["peak_bytes"] == 4000


def test_a_backward_pass_through_one_linear_layer_has_the_peak_one_can_work_out():
    """y = x W^T: at its peak there are x, W, y, its gradient and the gradient of W."""
    x, weight = torch.randn(64, 32), torch.nn.Parameter(torch.randn(128, 32))

    def step():
        y = x @ weight.T
        y.backward(torch.ones(64, 128))

    sizes = 4 * (64 * 32 + 128 * 32 + 64 * 128 + 64 * 128 + 128 * 32)
    assert cpu_peak(step, [x, weight])["peak_bytes"] == sizes


def test_shared_storages_and_views_count_once():
    base = torch.zeros(100)
    assert storage_bytes([base, base[:10], base.view(10, 10), base.detach()]) == 400
    assert storage_bytes([base, torch.zeros(100)]) == 800
    assert storage_bytes([]) == 0
    assert storage_bytes([torch.empty(0), torch.empty(0)]) == 0


def test_a_view_holds_its_whole_storage_alive():
    assert storage_bytes([torch.zeros(100)[:1]]) == 400


def test_the_resident_peak_of_the_process_is_reported_beside_it():
    peak = cpu_peak(lambda: None, [])
    assert peak["source"] == "cpu_allocator"
    assert peak["peak_rss_bytes"] > 2**20


@pytest.mark.parametrize(("deltas", "expected"), [([], 0), ([-5, 3], 0), ([5, -5, 4], 5), ([5, -2, 4], 7)])
def test_growth_is_the_highest_running_sum(deltas, expected):
    assert peak_growth(deltas) == expected


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.lists(st.integers(-(2**40), 2**40)))
def test_growth_is_the_highest_sum_of_any_beginning(deltas):
    assert peak_growth(iter(deltas)) == max(sum(deltas[:end]) for end in range(len(deltas) + 1))


def test_a_profile_that_cannot_be_written_is_a_full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"torch\.profiler could not write its trace") as caught:
            cpu_peak(lambda: bytes_of(KB), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno in NO_ROOM

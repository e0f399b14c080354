"""Views of a captured timeline: what ran when, who waited, how busy the GPU was, what crossed the link."""

from __future__ import annotations

import pytest

from dpscope.instruments.nsys.reading import KERNEL, MEMCPY, Activity, Call, CapturedTimeline, Range, read_timeline
from dpscope.instruments.nsys.views import gpu_timeline, host_and_gpu, lanes, levels, libraries, link, nesting
from tests import DATA

MS = 1_000_000


@pytest.fixture(scope="module")
def recorded():
    """Two steps of ghost clipping on an H200."""
    return read_timeline(DATA / "nsys_nvtx_step.sqlite")


@pytest.fixture
def made_up():
    """A copy from pageable memory, then a kernel on another stream that was launched late, then a wait."""
    return CapturedTimeline(
        activities=[
            Activity(MEMCPY, "Host-to-Device", 10 * MS, 14 * MS, 0, (0, 1), 8_000_000, 13, pageable=True),
            Activity(KERNEL, "nvjet_sm90_hhh", 18 * MS, 20 * MS, 0, (0, 2), 0, 7),
        ],
        calls=[
            Call("cudaMemcpyAsync", 9 * MS, 10 * MS, 1, (0, 1)),
            Call("cudaLaunchKernel", 16 * MS, 17 * MS, 1, (0, 2)),
            Call("cudaStreamSynchronize", 17 * MS, 20 * MS, 1, (0, 3)),
        ],
        ranges=[Range("step", 8 * MS, 20 * MS, 1)],
    )


def test_the_timeline_starts_with_the_first_event_of_the_capture(made_up):
    table = gpu_timeline(made_up)
    assert table[["stream", "kind", "start_ms", "ms"]].values.tolist() == [[13, "copy", 2, 4], [7, "kernel", 10, 2]]


def test_calls_that_wait_are_told_from_those_that_do_not(made_up):
    table = host_and_gpu(made_up).set_index("call")
    assert table["waits"].to_dict() == {
        "cudaStreamSynchronize": True,
        "cudaMemcpyAsync": False,
        "cudaLaunchKernel": False,
    }
    assert table.loc["cudaStreamSynchronize", "ms"] == 3


def test_busy_and_idle_are_shares_of_the_time_between_the_first_and_the_last_work(made_up):
    found = levels(made_up)
    assert found["GPU busy, % of the capture"] == pytest.approx(60)  # 4 + 2 of 10 ms
    assert found["GPU idle for want of a launch, % of the capture"] == pytest.approx(40)
    assert found["median from launch to start, µs"] == 2000


def test_copies_say_how_fast_they_were_and_from_which_memory(made_up):
    (row,) = link(made_up).to_dict("records")
    assert row == {
        "direction": "Host-to-Device",
        "host_memory": "pageable",
        "copies": 1,
        "bytes": 8_000_000,
        "ms": 4,
        "gb_per_second": 2,
    }


def test_a_capture_without_copies_has_an_empty_table(made_up):
    assert len(link(CapturedTimeline(made_up.activities[1:], made_up.calls, made_up.ranges))) == 0


def test_every_kernel_of_a_real_capture_belongs_to_one_library(recorded):
    table = libraries(recorded)
    kernels = [a for a in recorded.activities if a.kind == KERNEL]
    assert table["calls"].sum() == len(kernels)
    assert table["ms"].sum() == pytest.approx(sum(a.end - a.start for a in kernels) / 1e6)
    assert {"cuBLAS", "cuDNN", "torch"} <= set(table["library"])


def test_a_real_capture_knows_streams_and_pageable_memory(recorded):
    assert {a.stream for a in recorded.activities} == {7}
    assert set(link(recorded).set_index("direction")["host_memory"].items()) == {
        ("Device-to-Device", "none"),
        ("Device-to-Host", "pageable"),
        ("Host-to-Device", "pageable"),
    }


def test_a_range_within_another_has_a_lane_of_its_own():
    assert nesting([(0, 10), (1, 4), (2, 3), (5, 9), (10, 12)]) == [0, 1, 2, 1, 0]


def test_every_event_has_a_lane_ranges_above_calls_above_streams(made_up):
    table = lanes(made_up)
    assert list(dict.fromkeys(table["lane"])) == ["NVTX 1", "CUDA calls", "stream 7", "stream 13"]
    assert list(table["kind"]) == ["range", "call", "call", "wait", "kernel", "copy"]
    assert table["start_ms"].min() == 0

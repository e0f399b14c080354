"""Time in collectives, worked out on paper."""

from __future__ import annotations

import pytest

from dpscope.instruments.trace.attribution import collective_time
from dpscope.instruments.trace.events import parse_events
from dpscope.instruments.trace.summary import summarise
from tests.unit.instruments.trace.handmade import OTHER_STREAM, annotation, call, event, kernel, operator

GLOO_THREAD = 9


def test_on_a_gpu_kernels_of_nccl_count_once_where_they_overlap_and_are_exposed_where_nothing_else_runs() -> None:
    trace = parse_events(
        [
            annotation("ProfilerStep#1", 0, 1000),
            operator("aten::mm", 10, 50),
            *(call("cudaLaunchKernel", 20 + place, 1, place) for place in range(3)),
            kernel("nvjet_tst", 100, 200, 0),
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 200, 300, 1, OTHER_STREAM),
            kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", 400, 200, 2, OTHER_STREAM + 1),
        ]
    )
    found = collective_time([trace])
    assert {each["collective"]: each["ms"] for each in found["kinds"]} == {"all-gather": 0.3, "reduce-scatter": 0.2}
    assert found["under_way_ms"] == pytest.approx(0.4)
    assert found["exposed_ms"] == pytest.approx(0.3)
    families = {each["family"]: each["ms"] for each in summarise([trace])["families"]}
    assert families["collective"] == pytest.approx(0.5)


def test_on_a_cpu_ranges_of_gloos_threads_count_as_far_as_they_lie_within_the_step() -> None:
    trace = parse_events(
        [
            annotation("ProfilerStep#1", 0, 1000),
            operator("aten::mm", 10, 50),
            event("user_annotation", "gloo:all_gather", 100, 300, GLOO_THREAD),
            event("user_annotation", "gloo:all_reduce", 900, 300, GLOO_THREAD),
        ]
    )
    found = collective_time([trace])
    assert found["under_way_ms"] == pytest.approx(0.4)
    assert found["step_ms"] == pytest.approx(1.0)
    assert "exposed_ms" not in found


def test_a_step_without_collectives_has_none_in_its_summary() -> None:
    assert "collectives" not in summarise(
        [parse_events([annotation("ProfilerStep#1", 0, 9), operator("aten::mm", 1, 5)])]
    )

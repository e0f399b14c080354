"""The time that the GPU is busy with a step."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from dpscope.instruments.timing import Step
from dpscope.instruments.trace.attribution import union


def busy_seconds(step: Step) -> float:
    """Return how long kernels and copies of a step run on the GPU; 0 where the profiler sees none."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    recorded = getattr(profiler.profiler, "kineto_results", None)
    ran = [] if recorded is None else [each for each in recorded.events() if each.device_type().name == "CUDA"]
    covered = union((each.start_ns(), each.start_ns() + each.duration_ns()) for each in ran)
    return sum(end - start for start, end in covered) / 1e9

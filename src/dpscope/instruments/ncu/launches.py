"""How many kernels a step launches, seen without ncu."""

from __future__ import annotations

from collections.abc import Callable


def count_launches(step: Callable[[], object]) -> int | None:
    """Kernels (no copies, no fills) that one step launches on the GPU; None where torch.profiler cannot see them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
    except (RuntimeError, AttributeError):
        return None
    return sum(not name.startswith(("Memcpy", "Memset")) for name in events) or None

"""Peak memory of a step, from torch's own allocators.

torch's CPU allocator keeps no statistics, so one more step runs under the profiler: its allocations and frees are added
up, and the tensors that were live before it are counted in. Memory from before the step that is freed during it is not
seen, so such a step gives an upper bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dpscope.instruments.timing import Step
from dpscope.instruments.trace.chrome import chrome_trace
from dpscope.results.payloads.memory import MemoryPayload
from dpscope.vocabulary.components import CPU_ALLOCATOR, CUDA_ALLOCATOR


def cuda_peak() -> MemoryPayload:
    """Return the peaks of the caching allocator since the process began, or since they were reset, in bytes."""
    stats = torch.cuda.memory_stats()
    return {
        "source": CUDA_ALLOCATOR,
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_requested_bytes": stats["requested_bytes.all.peak"],
    }


def cublas_workspace_bytes() -> int:
    """Return the bytes that cuBLAS holds of the caching allocator. It frees them: call it when all is measured."""
    torch.cuda.synchronize()
    before: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return before - int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def write_memory_history(step: Step, path: Path) -> None:
    """Record one step with every allocation and its stack, as a file for PyTorch's memory_viz page. CUDA only."""
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        step()
        torch.cuda.synchronize()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def cpu_peak(step: Step, live: Iterable[Tensor]) -> MemoryPayload:
    """Return the peak of live bytes in one `step` that starts with the tensors of `live`, and the resident peak."""
    before = storage_bytes(live)
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    growth = peak_growth(_memory_events(profiler))
    return {
        "source": CPU_ALLOCATOR,
        "peak_bytes": before + growth,
        "live_before_step_bytes": before,
        "peak_rss_bytes": _peak_rss(),
    }


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence the profiler's native part, which reports its start, its end and some frees on the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`: views and shared parameters count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def peak_growth(deltas: Iterable[int]) -> int:
    """Return the highest running sum of allocations (+) and frees (-), starting from 0."""
    level = highest = 0
    for delta in deltas:
        level += delta
        highest = max(highest, level)
    return highest


def _memory_events(profiler: profile) -> list[int]:
    """Return the bytes of every allocation (+) and free (-) on the CPU, in order of time."""
    events = json.loads(chrome_trace(profiler))["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    return [e["args"]["Bytes"] for e in sorted(memory, key=lambda e: (e["ts"], e["args"].get("Ev Idx", 0)))]


def _peak_rss() -> int | None:
    """Return the process's highest resident set in bytes; None if the platform does not say."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""Memory by torch's own allocators: the peak of a step, and snapshots at the named stages of a run.

torch's CPU allocator keeps no statistics, so one more step runs under the profiler: its allocations and frees are added
up, and the tensors that were live before it are counted in. Memory from before the step that is freed during it is not
seen, so such a step gives an upper bound. Snapshots have the names that older scripts gave them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dpscope.instruments.timing import Step
from dpscope.instruments.trace.capture import chrome_trace
from dpscope.instruments.trace.events import parse_events
from dpscope.places import number_in
from dpscope.results.payloads.memory import MemoryPayload, Snapshot
from dpscope.units import mib
from dpscope.vocabulary.components import CPU_ALLOCATOR, CUDA_ALLOCATOR
from dpscope.vocabulary.phases import BACKWARD, FORWARD, MODEL_LOADED, MODEL_WRAPPED, OPTIMIZER_CREATED


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
    # Every allocation (+) and free (-) on the CPU, in order of time.
    memory = parse_events(json.loads(chrome_trace(profiler))["traceEvents"]).memory
    growth = peak_growth(each["bytes"] for each in memory if each["device"] == "cpu")
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
    return max(accumulate(deltas, initial=0))


def _peak_rss() -> int | None:
    """Return the process's highest resident set in bytes; None if the platform does not say."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Stage -> the snapshot's name. Wrapping is a stage of private training alone.
SNAPSHOT_NAMES = {
    MODEL_LOADED: "0_model_loaded",
    MODEL_WRAPPED: "1_wrapped_with_dp",
    OPTIMIZER_CREATED: "2_optimizer_created",
}
AFTER_WARMUP = "3_after_warmup"


class Snapshots:
    """Recorder of snapshots. `allocated`, the bytes live now, is not needed on CUDA and between steps."""

    def __init__(self, device: str, *, private: bool) -> None:
        self.taken: list[Snapshot] = []
        self._device = device
        self._private = private

    def take(self, name: str, allocated: int | None = None) -> None:
        if self._device == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        else:
            allocated = live_tensor_bytes() if allocated is None else allocated
            resident_pages = number_in("/proc/self/statm", r"^\d+ (\d+)") or 0  # 0 if the platform does not say
            reserved = resident_pages * os.sysconf("SC_PAGE_SIZE")
        self.taken.append(
            {"name": name, "allocated_mb": mib(allocated), "reserved_mb": mib(reserved), "timestamp": time.time()}
        )

    @contextmanager
    def at_stage(self, name: str) -> Iterator[None]:
        """Listen to the phases in which a trainer is made."""
        if name in SNAPSHOT_NAMES and (self._private or name != MODEL_WRAPPED):
            self.take(SNAPSHOT_NAMES[name])
        yield

    def in_iteration(self, iteration: int, allocated: Callable[[], int] | None = None) -> Callable[[str], Any]:
        """Return a phase listener for a step; it names physical batches from the second on."""
        batch = 0

        @contextmanager
        def listen(name: str) -> Iterator[None]:
            nonlocal batch
            batch += name == FORWARD
            stage = f"iter{iteration}" + (f"_batch{batch}" if batch > 1 else "")
            if name == FORWARD:
                self.take(f"{stage}_before_forward", allocated and allocated())
            yield
            if name in (FORWARD, BACKWARD):
                self.take(f"{stage}_after_{name}", allocated and allocated())

        return listen

    def after_step(self, iteration: int, allocated: int | None = None) -> None:
        self.take(f"iter{iteration}_after_step", allocated)


def live_tensor_bytes() -> int:
    """Return the bytes of the CPU tensors that Python can reach; between steps there are no others."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return storage_bytes(
        tensor
        for tensor in tensors
        if not is_lazy(tensor)
        and not is_traceable_wrapper_subclass(tensor)  # a sharded parameter: its own shard is a tensor as well
        and _has_cpu_bytes(tensor)
    )


def _has_cpu_bytes(tensor: Tensor) -> bool:
    """Return whether a tensor has bytes on the CPU: those of torch.compile's tracing and of torch.func have none."""
    try:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True

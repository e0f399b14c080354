"""Snapshots: allocated and reserved memory at the named stages of a run, under the names older scripts gave them."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dpscope.instruments.peaks import storage_bytes
from dpscope.results.payloads.memory import Snapshot
from dpscope.units import mib
from dpscope.vocabulary.phases import BACKWARD, FORWARD, MODEL_LOADED, MODEL_WRAPPED, OPTIMIZER_CREATED

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
            reserved = resident_bytes()
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


def resident_bytes() -> int:
    """Return the process's resident set; 0 if the platform does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0

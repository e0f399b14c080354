"""Memory budget of a step: it decides if faster per-sample gradients may be kept, and checkpointed blocks held.

Ordinary training of the same model peaks where backward begins, with all activations and what the loss needs besides,
or where backward ends, with all gradients. Until backward reaches its first layer an engine holds just what ordinary
training holds, so both peaks are known there:

    beginning   what is live at the first layer, and how far forward and loss went above that
    end         what was live before forward, and the gradients that are not there yet

If blocks are checkpointed, the activations of one of them replace forward and loss, or, at the end, its gradients,
whichever is larger.

Backward frees activations as it proceeds. Kept gradients may take their place up to the larger of the two peaks, so
that the peak stays that of ordinary training. Forward and loss are seen only if they raise the allocator's peak. If
something larger ran before, their extra memory counts as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import NamedTuple

import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.shards import local

LEAN = "lean"

MemoryLimit = float | str | None


class Allocated(NamedTuple):
    """Bytes that torch's allocator has handed out: now, and at most since its peak was last reset."""

    current: int
    peak: int


def allocated_on(device: torch.device) -> Allocated | None:
    """Return the allocator's figures on CUDA, elsewhere None. Takes some microseconds and waits for no device."""
    if (planned := dry_run.current()) is not None:
        return Allocated(*planned.allocated())
    if device.type != "cuda":
        return None
    counted = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return Allocated(counted["current"], counted["peak"]) if counted.get("current") else None


def check_limit(limit: MemoryLimit) -> None:
    if limit is None or limit == LEAN:
        return
    is_number = isinstance(limit, Real) and not isinstance(limit, bool)  # True would be one byte
    if not is_number or not 0 < float(limit) < math.inf:
        raise UserError(f'memory_budget must be a number of bytes above 0, "{LEAN}" or None, not {limit!r}')


class MemoryBudget:
    """Budget of bytes on a device.

    limit: bytes on the device, all of torch's memory counted; None: the peak of ordinary training; "lean": the same for
    held checkpointed blocks, and a gradient is kept only if that takes no more memory than x and g.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        parameters: Collection[nn.Parameter],
        read: Callable[[], Allocated | None] | None = None,
    ) -> None:
        check_limit(limit)
        self.limit = limit
        self._parameters = parameters
        self.allocated = read or (lambda: allocated_on(next(iter(parameters)).device) if parameters else None)
        self._before_forward: Allocated | None = None
        self._first_layer: Allocated | None = None
        self._ceiling: float | None = None  # of this micro-batch, once somebody has asked
        self._in_backward = False
        self.above = 0  # how far forward and loss go above what is live at the first layer
        self.reserved = 0  # bytes that checkpointed blocks will take in this micro-batch, besides what is live

    def begin_forward(self) -> None:
        """Begin a micro-batch's first forward pass."""
        self.close()
        self._before_forward = self.allocated()

    def begin_again(self, above: int) -> None:
        """Begin the forward pass again, after passes that did not belong to the step."""
        self.above = above
        self.begin_forward()

    def begin_backward(self) -> None:
        """Note that a backward pass has reached a layer; only a micro-batch's first counts."""
        if self._in_backward:
            return
        self._in_backward = True
        self._first_layer = now = self.allocated()
        before = self._before_forward
        if now is not None and before is not None and now.peak > before.peak:
            self.above = max(self.above, now.peak - now.current)

    def close(self) -> None:
        """Close the micro-batch: its live memory does not describe the next."""
        self._before_forward = self._first_layer = self._ceiling = None
        self._in_backward = False

    def fits(self, more: float) -> bool:
        """Return True if `more` bytes may be kept, in addition to what is live, to save time."""
        room = None if self.limit == LEAN else self.room()
        return room is not None and more + self.reserved <= room

    def room(self) -> float | None:
        """Return the free bytes below the peak of ordinary training, or below the limit; None if not tracked."""
        ceiling = self.ceiling()
        now = None if ceiling is None else self.allocated()
        return None if now is None or ceiling is None else ceiling - now.current

    def ceiling(self, activations: int = 0, gradients: int = 0) -> float | None:
        """Return the bytes that a step may take at its peak; None if not tracked, and before backward begins.

        activations, gradients: of one checkpointed block, while backward is in it
        """
        if self._first_layer is None:
            return None
        if self.limit is not None and not isinstance(self.limit, str):
            return float(self.limit)
        if self._ceiling is None:  # the peak of ordinary training
            self._ceiling = self._first_layer.current + max(self.above, activations)
            if self._before_forward is not None:
                missing = sum(local(p).nbytes for p in self._parameters if p.requires_grad and p.grad is None)
                end = self._before_forward.current + missing + max(0, activations - gradients)
                self._ceiling = max(self._ceiling, end)
        return self._ceiling

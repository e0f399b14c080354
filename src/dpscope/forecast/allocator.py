"""A model of torch's caching allocator: segments that are reserved, and blocks that are split and merged in them.

After c10/cuda/CUDACachingAllocator.cpp with its default settings. A step needs what is reserved, not only what is
allocated: free blocks that are too small, or in the other pool, cannot be used. If a segment would exceed the limit,
all empty segments are released first, as torch does before it reports out of memory. Storages of fake tensors are
counted as they are made and freed.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dpscope.forecast.cards import Card
from dpscope.forecast.cuda_operators import bytes_inside
from dpscope.units import MIB

UNIT = 512  # what sizes are rounded to
LARGEST_SMALL = 2**20  # the largest allocation of the small pool
SMALL_SEGMENT, LARGE_SEGMENT, HUGE = 2 * 2**20, 20 * 2**20, 10 * 2**20
ROUND_SEGMENT = 2 * 2**20


class OutOfFakeMemory(Exception):
    """A step needs more than the limit."""


@dataclass(eq=False, slots=True)
class MemoryBlock:
    size: int
    segment: int
    start: int
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None
    free: bool = True


class Segments:
    """Two pools of blocks. `limit`: bytes that may be reserved."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.step_peak = 0  # of allocated bytes, since somebody set it to 0
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (size, address), small and large
        self._at: dict[int, MemoryBlock] = {}  # free blocks by address
        self._next_address = 0

    def allocate(self, nbytes: int) -> MemoryBlock:
        """Hand out a block of at least so many bytes."""
        size = max(UNIT, -(-nbytes // UNIT) * UNIT)
        pool = self._free[size > LARGEST_SMALL]
        place = bisect_left(pool, (size, -1))
        block = self._at.pop(pool.pop(place)[1]) if place < len(pool) else self._reserve(size)
        rest = block.size - size
        if rest >= UNIT if size <= LARGEST_SMALL else rest > LARGEST_SMALL:
            remaining = MemoryBlock(rest, block.segment, block.start + size, block, block.next)
            if block.next is not None:
                block.next.previous = remaining
            block.next, block.size = remaining, size
            self._put(remaining, pool)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.step_peak:
            self.step_peak = self.allocated
            self.peak_allocated = max(self.peak_allocated, self.step_peak)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Take a block back, and merge it with free neighbours."""
        pool = self._free[self._is_large(block)]
        self.allocated -= block.size
        for other in (block.previous, block.next):
            if other is not None and other.free:
                del pool[bisect_left(pool, (other.size, other.start))]
                del self._at[other.start]
                first, second = (other, block) if other.start < block.start else (block, other)
                first.size += second.size
                first.next = second.next
                if second.next is not None:
                    second.next.previous = first
                block = first
        self._put(block, pool)

    def _is_large(self, block: MemoryBlock) -> bool:
        return block.segment > SMALL_SEGMENT

    def _put(self, block: MemoryBlock, pool: list[tuple[int, int]]) -> None:
        block.free = True
        self._at[block.start] = block
        insort(pool, (block.size, block.start))

    def _reserve(self, size: int) -> MemoryBlock:
        whole = (
            SMALL_SEGMENT
            if size <= LARGEST_SMALL
            else LARGE_SEGMENT
            if size < HUGE
            else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        )
        if self.limit is not None and self.reserved + whole > self.limit:
            self.release()
            if self.reserved + whole > self.limit:
                raise OutOfFakeMemory
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += 2**44
        return MemoryBlock(whole, whole, self._next_address)

    def release(self) -> None:
        """Give segments back that hold nothing."""
        for pool in self._free:
            kept = []
            for size, start in pool:
                block = self._at[start]
                if block.previous is None and block.next is None:
                    self.reserved -= size
                    del self._at[start]
                else:
                    kept.append((size, start))
            pool[:] = kept


class Allocator:
    """Count of the fake device's storages. `limit`: bytes that may be reserved."""

    def __init__(self, card: Card, limit: int | None = None) -> None:
        self._card = card
        self.segments = Segments(limit)
        self.counting = True
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], MemoryBlock]] = {}
        workspaces = card.workspace_bytes
        for size in (workspaces // 2 - MIB // 2, workspaces // 2 - MIB // 2, MIB):
            self.segments.allocate(size)

    @property
    def current(self) -> int:
        return self.segments.allocated

    @property
    def peak(self) -> int:
        return self.segments.peak_allocated

    def note_call(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count the storages that an operator made, and what it allocated internally."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                self._note(tensor)
        inside = bytes_inside(func, args, self._card)
        if inside:
            self.segments.free(self.segments.allocate(inside))

    def _note(self, tensor: Tensor) -> None:
        """Allocate the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        if self.counting and storage._cdata not in self._live:
            self._take(storage)

    def _take(self, storage: torch.UntypedStorage) -> None:
        if size := storage.nbytes():
            address = storage._cdata
            self._live[address] = weakref.ref(storage, partial(self._free, address)), self.segments.allocate(size)

    def begin_again(self, limit: int | None) -> None:
        """Reset the peak, and set how many bytes may be reserved from now on."""
        segments = self.segments
        segments.release()
        segments.limit = limit
        segments.step_peak = segments.peak_allocated = segments.allocated
        segments.peak_reserved = segments.reserved

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage: FSDP frees gathered parameters by resizing their storages to zero."""
        if storage._cdata in self._live:
            self.segments.free(self._live.pop(storage._cdata)[1])
        if storage.device.type == "meta":
            self._take(storage)

    def _free(self, address: int, reference: object) -> None:
        if address in self._live and self._live[address][0] is reference:
            self.segments.free(self._live.pop(address)[1])

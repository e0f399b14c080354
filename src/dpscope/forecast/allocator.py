"""Memory of the fake device that storages of fake tensors take, as they come and go."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.forecast.cards import Card
from dpscope.forecast.cuda_operators import bytes_inside
from dpscope.forecast.segments import MemoryBlock, Segments
from dpscope.units import MIB


class Allocator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of the fake device. `limit`: bytes that may be reserved."""

    def __init__(self, card: Card, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._card = card
        self.segments = Segments(limit)
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self._note(tensor)
        inside = bytes_inside(func, args, self._card)
        if inside:
            self.segments.free(self.segments.allocate(inside))
        return result

    def _note(self, tensor: Tensor) -> None:
        """Allocate the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live and storage.nbytes():
            block = self.segments.allocate(storage.nbytes())
            self._live[address] = weakref.ref(storage, partial(self._free, address)), block

    def _free(self, address: int, reference: object) -> None:
        _, block = self._live.pop(address)
        self.segments.free(block)

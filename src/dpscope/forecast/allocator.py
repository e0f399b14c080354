"""torch's caching allocator on paper: what is live, and at most was, when storages of fake tensors come and go."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.forecast.cards import Card
from dpscope.forecast.cuda_operators import bytes_inside

BLOCK = 512  # what the size of an allocation is rounded to


def rounded(nbytes: int) -> int:
    return max(BLOCK, -(-nbytes // BLOCK) * BLOCK)


class Allocator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages of the fake device."""

    def __init__(self, card: Card) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._card = card
        self.current = 0
        self.peak = 0
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def reset_peak(self) -> None:
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self.note(tensor)
        inside = bytes_inside(func, args, self._card)
        if inside:
            self.peak = max(self.peak, self.current + inside)
        return result

    def note(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            size = rounded(storage.nbytes())
            self._live[address] = weakref.ref(storage, partial(self._free, address)), size
            self.current += size
            self.peak = max(self.peak, self.current)

    def _free(self, address: int, reference: object) -> None:
        _, size = self._live.pop(address)
        self.current -= size

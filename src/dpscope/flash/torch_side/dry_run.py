"""A hook for running the engine on fake tensors: a `DryRun` answers in place of the device.

Fake tensors have shapes and no values (torch._subclasses.fake_tensor). While a dry run is open

- rows are taken to be the samples, because there are no values to find that out from. Verification runs only where
  `verifies` is set, to show what it allocates: what it compares is taken to be equal,
- kernels are chosen as on a GPU of `capability`, and launching one does nothing,
- the allocator's figures are those that `allocated` returns.

A dry run trains nothing. It only shows what a step would allocate (dpscope.forecast). Not part of the public interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass
class DryRun:
    capability: tuple[int, int]
    multiprocessors: int
    allocated: Callable[[], tuple[int, int]]  # bytes: now, and the peak
    verifies: bool = False  # each forward pass is verified first


_open: list[DryRun] = []
_forget: list[Callable[[], None]] = []  # caches that hold tensors


def current() -> DryRun | None:
    """Return the dry run that is open, or None."""
    return _open[-1] if _open else None


def read(tensor: Tensor, otherwise: Any) -> Any:
    """Return the values of a tensor of at most one dimension; `otherwise` for each in a dry run, where it has none."""
    if current() is None:
        return tensor.tolist()
    return [otherwise] * len(tensor) if tensor.dim() else otherwise


def forget_between(clear: Callable[[], None]) -> None:
    """Register a function that clears a cache of tensors: no fake tensor may outlive its dry run."""
    _forget.append(clear)


def placeholder(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, because fake tensors cannot change their class."""
    with _disable_current_modes():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)


@contextmanager
def dry_running(run: DryRun) -> Iterator[None]:
    """Open a dry run. Every engine that is made and stepped inside has to be of fake tensors."""
    for clear in _forget:
        clear()
    _open.append(run)
    try:
        yield
    finally:
        _open.remove(run)
        for clear in _forget:
            clear()

"""Sums of gradients: torch's engine adds in place, but not while a dispatch mode watches.

Where a tensor is used twice, the engine adds up its gradients. It adds into the first of them if nothing else holds
that one (`InputBuffer::accumulate`). Under a `TorchDispatchMode` it makes a third tensor instead, because it takes
every tensor for one of a subclass. A mode that counts memory would then count what a step without it never allocates:
one more gradient of a tied embedding, say. Such a mode passes each operator through `as_without_modes`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_WRAPPERS = ("_fn", "inner", "__torch_dispatch__")  # torch's, to keep torch.compile out of modes, and subclasses
_RUNS_ENGINE = graph._engine_run_backward.__code__


def as_without_modes(func: Any, args: Any, caller: FrameType | None) -> Any:
    """Return the operator that torch would call without modes: `func`, or a sum in place.

    Args:
        func: the operator that a mode was given.
        args: its operands.
        caller: the frame that called the mode. On the engine's own threads there is none.
    """
    if func is not _ADD or torch.is_grad_enabled() or not _is_engine(caller):
        return func
    fits = all(map(_is_plain, args)) and args[0].shape == args[1].shape
    return _ADD_IN_PLACE if fits and _counts(args[0]) in _alone else func


def _is_engine(caller: FrameType | None) -> bool:
    """Return whether the engine itself called an operator, and no code of Python in between."""
    while caller is not None and caller.f_code.co_name in _WRAPPERS:
        caller = caller.f_back
    return torch._C._current_autograd_node() is not None and (caller is None or caller.f_code is _RUNS_ENGINE)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether it is a dense tensor of no subclass, or a fake one."""
    return (type(tensor) is Tensor or type(tensor).__name__ == "FakeTensor") and tensor.layout == torch.strided


def _counts(tensor: Any) -> tuple[int, int, int]:
    """Return how often Python counts a tensor as held, and torch the tensor and its storage."""
    return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def prepare() -> None:
    """Learn the counts of a gradient that the engine alone holds. Until then, no operator is replaced.

    Call it before each use: torch.compile changes them, because its wrappers of a mode hold the operands as well.
    """
    if not hasattr(Tensor, "_use_count"):
        return
    _alone.clear()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                _alone.append(_counts(args[0]))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, device="cpu", requires_grad=True)
    with torch.enable_grad():
        y = torch.sin(x), torch.cos(x)
    with Counting():  # type: ignore[no-untyped-call]
        torch.autograd.grad(y, x, (torch.ones(2), torch.ones(2)))


_alone: list[tuple[int, int, int]] = []

"""Kernels that torch's dispatcher does not see, announced to listeners.

A hand-written kernel gets bare pointers, so no dispatch mode learns what it moves. Its launch is announced here: the
tensors that are read and written in full, and the floating-point operations. Without a listener a launch costs one look
at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: each tensor of `reads` is read once and each of `writes` written once, whatever caches do."""

    name: str
    family: str  # of vocabulary/families.py
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    flops: int = 0


LaunchListener = Callable[[Launch], None]

_listeners: list[LaunchListener] = []


def announce(describe: Callable[[], Launch]) -> None:
    """Notify listeners of a launch; `describe` is not called without listeners."""
    if _listeners:
        launch = describe()
        for listener in list(_listeners):
            listener(launch)


@contextmanager
def hearing(listener: LaunchListener) -> Iterator[None]:
    """Announce every launch to `listener` while the context is open."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)

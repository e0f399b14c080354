"""Calls of torch.utils.checkpoint.checkpoint, seen through any reference to the function.

`checkpoint` is imported by name and put into partial objects (Hugging Face's `_gradient_checkpointing_func`), so that
replacing the attribute of its module would miss most calls. But it is a wrapper around the function that does the work,
which is looked up in the wrapper's closure at every call: that function is replaced while calls are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType
from typing import Any

from torch.utils.checkpoint import checkpoint

# (checkpoint, function, args, kwargs) of a call -> what it gives back.
Watcher = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_original: Callable[..., Any] = getattr(checkpoint, "__wrapped__", checkpoint)
_watchers = threading.local()
_lock = threading.Lock()
_threads: list[int] = []  # that watch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watcher: Watcher | None = getattr(_watchers, "current", None)
    if watcher is None:
        return _original(function, *args, **kwargs)
    return watcher(_original, function, args, kwargs)


_call.__dynamo_disable = _call  # type: ignore[attr-defined]  # where torch looks for the variant that breaks graphs


def _cell() -> CellType | None:
    """Return the cell of the wrapper's closure that holds the function that does the work."""
    cells = checkpoint.__closure__ or ()
    return next((cell for cell in cells if cell.cell_contents in (_original, _call)), None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Send this thread's calls of `checkpoint` to `watcher` inside the block."""
    cell, outer = _cell(), getattr(_watchers, "current", None)
    if cell is None:
        yield
        return
    with _lock:
        _threads.append(threading.get_ident())
        cell.cell_contents = _call
    _watchers.current = watcher
    try:
        yield
    finally:
        _watchers.current = outer
        with _lock:
            _threads.remove(threading.get_ident())
            if not _threads:
                cell.cell_contents = _original


@cache
def can_be_watched() -> bool:
    """Return True if this version of torch lets its checkpoints be watched."""
    seen = []
    with watching(lambda original, function, args, kwargs: seen.append(function)):
        checkpoint(int, use_reentrant=False)
    return seen == [int]

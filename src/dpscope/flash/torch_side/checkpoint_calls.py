"""Calls of torch.utils.checkpoint.checkpoint, seen through any reference to the function.

`checkpoint` is imported by name and put into partial objects (Hugging Face's `_gradient_checkpointing_func`), so that
replacing the attribute of its module would miss most calls. But it is a wrapper around the function that does the work,
which is looked up in the wrapper's closure at every call: that function is replaced while calls are watched.

From 2.14 on there is a second form, `checkpoint(use_reentrant=False)(function)`, and a function of the module does the
work of both: that one is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

# (checkpoint, function, args, kwargs) of a call -> what it gives back.
Watcher = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_original: Callable[..., Any] = getattr(checkpoint, "__wrapped__", checkpoint)
_work: Callable[..., Any] | None = getattr(checkpoints, "_checkpoint_impl", None)
_watchers = threading.local()
_lock = threading.Lock()
_threads: list[int] = []  # that watch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watcher: Watcher | None = getattr(_watchers, "current", None)
    if watcher is None:
        return _original(function, *args, **kwargs)
    return watcher(_original, function, args, kwargs)


_call.__dynamo_disable = _call  # type: ignore[attr-defined]  # where torch looks for the variant that breaks graphs


def _call_of_any_form(function: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Any:
    assert _work is not None
    watcher: Watcher | None = getattr(_watchers, "current", None)
    if watcher is None:
        return _work(function, args, kwargs, **options)

    def original(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in options}
        return _work(function, args, kwargs, **given)

    return watcher(original, function, args, {**kwargs, **options})


def _replacement() -> Callable[[bool], None] | None:
    """Return a function that replaces the function that does the work, or puts it back; None if it is not found."""
    if _work is not None:
        return lambda replace: setattr(checkpoints, "_checkpoint_impl", _call_of_any_form if replace else _work)
    cells = checkpoint.__closure__ or ()
    cell = next((cell for cell in cells if cell.cell_contents in (_original, _call)), None)
    return cell and (lambda replace: setattr(cell, "cell_contents", _call if replace else _original))


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Send this thread's calls of `checkpoint` to `watcher` inside the block."""
    replace, outer = _replacement(), getattr(_watchers, "current", None)
    if replace is None:
        yield
        return
    with _lock:
        _threads.append(threading.get_ident())
        replace(True)
    _watchers.current = watcher
    try:
        yield
    finally:
        _watchers.current = outer
        with _lock:
            _threads.remove(threading.get_ident())
            if not _threads:
                replace(False)


@cache
def can_be_watched() -> bool:
    """Return True if this version of torch lets its checkpoints be watched."""
    seen = []
    with watching(lambda original, function, args, kwargs: seen.append(function)):
        checkpoint(int, use_reentrant=False)
    return seen == [int]

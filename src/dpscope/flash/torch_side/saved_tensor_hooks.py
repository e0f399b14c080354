"""The hooks on saved tensors that are in force: those of a checkpoint, of `save_on_cpu` or of the user.

Up to 2.7 torch does not expose them, so the context manager that all of them enter is made to note them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_top: Callable[[bool], Hooks | None] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Entered(threading.local):
    """The hooks that this thread entered and has not left, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


_entered = Entered()


def current_hooks() -> Hooks | None:
    """Return the innermost hooks that pack and unpack saved tensors here; None if there are none."""
    if _top is not None:
        return _top(True)
    return _entered.hooks[-1] if _entered.hooks else None


def note_entries(manager: type[saved_tensors_hooks], entered: Entered) -> None:
    """Have the context manager note in `entered` which hooks were entered and not left."""
    enter, leave = manager.__enter__, manager.__exit__

    @wraps(enter)
    def noted_enter(self: saved_tensors_hooks) -> None:
        enter(self)
        entered.hooks.append((self.pack_hook, self.unpack_hook))

    @wraps(leave)
    def noted_leave(self: saved_tensors_hooks, *error: object) -> None:
        entered.hooks.pop()
        leave(self, *error)

    manager.__enter__, manager.__exit__ = noted_enter, noted_leave  # type: ignore[method-assign]


if _top is None:
    note_entries(saved_tensors_hooks, _entered)

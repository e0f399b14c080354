"""Phases of a training step, defined once and announced to listeners.

Trainers enter phases; instruments listen (memory snapshots, `record_function`, NVTX). Without a listener a phase
costs one attribute look-up, so the time instrument sees an undisturbed step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

FORWARD = "forward"
BACKWARD = "backward"
CLIP = "clip"
NOISE = "noise"
OPTIMIZER = "optimizer"

PHASES = (FORWARD, BACKWARD, CLIP, NOISE, OPTIMIZER)
BETWEEN_PHASES = "between phases"  # what belongs to none of them
STEP = "step"  # what a whole step is called where it has a range of its own around its phases

# Moments while a trainer is made, announced to the same listeners.
MODEL_LOADED = "model_loaded"
MODEL_WRAPPED = "model_wrapped"
OPTIMIZER_CREATED = "optimizer_created"

PhaseListener = Callable[[str], AbstractContextManager[object]]

_listeners: list[PhaseListener] = []

P = ParamSpec("P")
R = TypeVar("R")


def phase(name: str) -> AbstractContextManager[object]:
    """Mark a phase of a step. Phases nest: `clip` inside `backward` is `clip`."""
    if not _listeners:
        return nullcontext()
    return _announced(name)


def moment(name: str) -> None:
    """Mark a phase of no length."""
    with phase(name):
        pass


@contextmanager
def _announced(name: str) -> Iterator[None]:
    entered = []
    try:
        for listener in list(_listeners):
            context = listener(name)
            context.__enter__()
            entered.append(context)
        yield
    finally:
        for context in reversed(entered):
            context.__exit__(None, None, None)


@contextmanager
def listening(listener: PhaseListener) -> Iterator[None]:
    """Announce every phase to `listener` while the context is open."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def in_phase(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with each call marked as a phase, for functions of other libraries."""

    @wraps(function)
    def announced(*args: P.args, **kwargs: P.kwargs) -> R:
        with phase(name):
            return function(*args, **kwargs)

    return announced

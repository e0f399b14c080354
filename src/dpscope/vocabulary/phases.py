"""Announcements to instruments: phases of a step, kernels and memory that torch's dispatcher does not show.

Trainers enter phases; instruments listen (memory snapshots, `record_function`, NVTX). Without a listener a phase costs
one attribute look-up, so the time instrument sees an undisturbed step. A hand-written kernel gets bare pointers, so no
dispatch mode learns what it moves: its launch is announced, with the tensors that are read and written in full, and the
floating-point operations. Families of kernels and operators are work that a person recognises, not symbol names:
instruments sort names into them, reports show them in this order. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


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
_entered: list[str] = []

P = ParamSpec("P")
R = TypeVar("R")


def phase(name: str) -> AbstractContextManager[object]:
    """Mark a phase of a step. Phases nest: `clip` inside `backward` is `clip`."""
    if not _listeners:
        return nullcontext()
    return _announced(name)


def innermost() -> str | None:
    """Return the phase that runs now; None between phases, and without a listener."""
    return _entered[-1] if _entered else None


def moment(name: str) -> None:
    """Mark a phase of no length."""
    with phase(name):
        pass


@contextmanager
def _announced(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in list(_listeners):
            context = listener(name)
            context.__enter__()
            stack.callback(context.__exit__, None, None, None)  # as if there were no error
        _entered.append(name)
        stack.callback(_entered.pop)
        yield


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


GEMM = "gemm"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
REDUCTION = "reduction"
NORMALISATION = "normalisation"
OPTIMIZER_FAMILY = "optimizer"
CLIPPING = "clipping"
NOISE_FAMILY = "noise"
COPY = "copy"
EMBEDDING = "embedding"
COLLECTIVE = "collective"
OTHER = "other"

FAMILY_LABELS = {
    GEMM: "matrix products",
    ATTENTION: "attention",
    ELEMENTWISE: "elementwise",
    REDUCTION: "reductions",
    NORMALISATION: "normalisation",
    OPTIMIZER_FAMILY: "optimizer",
    CLIPPING: "clipping",
    NOISE_FAMILY: "noise",
    COPY: "copies, casts and fills",
    EMBEDDING: "embedding and indexing",
    COLLECTIVE: "collectives between ranks",
    OTHER: "other",
}

FAMILIES = tuple(FAMILY_LABELS)


F = TypeVar("F", bound=Callable[..., Any])

_components: dict[tuple[CodeType, str], str] = {}


def allocates(component: str, *operators: str) -> Callable[[F], F]:
    """Declare that calls of `operators` (`aten::mv`) by the function itself make `component`."""

    def declare(function: F) -> F:
        for operator in operators:
            _components[function.__code__, operator] = component
        return function

    return declare


def component_of(function: CodeType | None, operator: str) -> str | None:
    """Return the component that `function` declared for its calls of `operator`."""
    return None if function is None else _components.get((function, operator))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: each tensor of `reads` is read once and each of `writes` written once, whatever caches do."""

    name: str
    family: str  # of `FAMILIES`
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    flops: int = 0


LaunchListener = Callable[[Launch], None]

_launch_listeners: list[LaunchListener] = []


def announce(describe: Callable[[], Launch]) -> None:
    """Notify listeners of a launch; `describe` is not called without listeners."""
    if _launch_listeners:
        launch = describe()
        for listener in list(_launch_listeners):
            listener(launch)


@contextmanager
def hearing(listener: LaunchListener) -> Iterator[None]:
    """Announce every launch to `listener` while the context is open."""
    _launch_listeners.append(listener)
    try:
        yield
    finally:
        _launch_listeners.remove(listener)

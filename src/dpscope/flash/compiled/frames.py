"""Which frames torch.compile traces: the model's forward as one graph, and none of the engine's bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._dynamo import decorators, eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Sets what looks at each new Python frame and gives back what did before. None: frames run as they are.
_set_callback: Callable[[Any], Any] | None = getattr(eval_frame, "set_eval_frame", None)
_skip: Callable[[Any], Any] | None = getattr(decorators, "skip", None)

COMPILE_FIRST = (
    "the model was compiled after it was made private, and what counts its samples runs between graphs: for "
    "fullgraph=True call torch.compile first, then make_private"
)


def uncompiled(reason: str) -> Callable[[_Function], _Function]:
    """Decorates a function that breaks graphs, and runs as it is with all it calls."""

    disable: Any = torch.compiler.disable

    def decorate(function: _Function) -> _Function:
        try:
            return disable(function, reason=reason)  # type: ignore[no-any-return]
        except TypeError:  # before torch 2.7
            return disable(function)  # type: ignore[no-any-return]

    return decorate


class CompiledAfter(Protocol):
    """A tap that torch.compile has met."""

    original: Callable[..., Any]

    def run_compiled(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def _run_outside(tap: CompiledAfter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tap's work, not compiled, in which its forward is compiled as one frame.

    Called where torch.compile looks at every new frame, and itself skipped by it: only C functions are called here
    while that is so, and the frame that is to be compiled.
    """
    assert _set_callback is not None
    callback = _set_callback(None)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        _set_callback(callback)
        try:
            return _forward_frame(tap.original, args, kwargs)
        finally:
            _set_callback(None)

    try:
        return tap.run_compiled(compiled, args, kwargs)
    finally:
        _set_callback(callback)


def _forward_frame(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A frame of our own: torch.compile begins no graph in a frame of torch's modules, such as nn.Sequential's."""
    return forward(*args, **kwargs)


@uncompiled(COMPILE_FIRST)
def _run_eagerly(tap: CompiledAfter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tap.run_compiled(tap.original, args, kwargs)


_run_outside._torchdynamo_disable_msg = COMPILE_FIRST  # type: ignore[attr-defined]  # what torch.compile shows

# In a version of torch that lacks either, the forward runs as it is: exact, and not compiled.
run_outside = _run_eagerly if _set_callback is None or _skip is None else _skip(_run_outside)


def is_wrapper(module: object) -> bool:
    """Whether it is what torch.compile(module) gives back."""
    return isinstance(module, eval_frame.OptimizedModule)


def original_of(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile, if there are any."""
    while is_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module

"""CUDA graphs: capture and replay, the engine's own capture of a step, and captures by hand, which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.torch_side import dry_run

_Function = TypeVar("_Function", bound=Callable[..., Any])


def has_graphs(device: torch.device) -> bool:
    """Return whether steps on the device can be captured."""
    return device.type == "cuda"


def record(run: Callable[[], Tensor], pool: Any = None) -> tuple[Callable[[], None], Tensor]:
    """Capture the device work of `run`. Return a function that replays it, and its result, which a replay fills."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        # Tables of pointers are written on another stream meanwhile, which the other modes forbid.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):
            result = run()
    except BaseException:
        # torch leaves the generator as if the capture still ran: it could draw nothing any more.
        generator.graphsafe_set_state(before)
        raise
    return graph.replay, result


class OwnCapture:
    """A capture that the engine makes itself (graphed/).

    Tables of pointers are constants inside a graph, because addresses never change. They are written while it is
    captured, on a stream of their own, and kept as long as the graph.
    """

    def __init__(self) -> None:
        self.kept: list[object] = []

    def keep(self, host: Tensor, device: torch.device) -> Tensor:
        """Return the tensor on the device, written outside of the graph."""
        with torch.cuda.stream(_other_stream(device)):
            table = host.to(device)
        self.kept.append(table)
        return table


_streams: dict[torch.device, Any] = {}


def _other_stream(device: torch.device) -> Any:
    """Return a stream besides the current one. torch hands out few streams in turn, the one that is captured too."""
    if device.type != "cuda":
        return None
    stream, current = _streams.get(device), torch.cuda.current_stream(device)
    while stream is None or stream == current:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


_own: list[OwnCapture] = []


def own_capture() -> OwnCapture | None:
    """Return the engine's capture that runs, or None."""
    return _own[-1] if _own else None


def device_cache(maxsize: int) -> Callable[[_Function], _Function]:
    """Cache tensors on a device by arguments, as lru_cache does. A graph keeps those that it reads."""

    def decorate(function: _Function) -> _Function:
        cached: Any = lru_cache(maxsize)(function)
        dry_run.forget_between(cached.cache_clear)

        @wraps(function)
        def kept(*args: Any) -> Any:
            found = cached(*args)
            if _own:
                _own[-1].kept.append(found)
            return found

        return cast("_Function", kept)

    return decorate


@contextmanager
def capturing(capture: OwnCapture) -> Iterator[None]:
    """Mark work of the current stream inside the block as the engine's own capture."""
    _own.append(capture)
    try:
        yield
    finally:
        _own.remove(capture)


def _yes() -> bool:
    return True


@contextmanager
def as_captured() -> Iterator[None]:
    """Let models see a capture, as torch tells of one, in eager passes and in captures alike.

    transformers, say, makes masks in a capture that it leaves out elsewhere. So what is verified, and what
    torch.compile compiles, is what a graph records.
    """
    with patch.object(torch.cuda, "is_current_stream_capturing", _yes):
        yield


def is_captured() -> bool:
    """Return whether the current stream is captured, whatever `as_captured` lets others see."""
    says: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    return bool(_own) if says is _yes else says()


def refuse_capture() -> None:
    """Raise UserError while the current stream is captured by hand (torch.cuda.graph, make_graphed_callables).

    The step's key, Adam's corrections and the learning rate are host values. A replayed graph would use them again:
    above all, the same noise. The code that counts samples and accounts for privacy would not run at all.
    """
    if _own:
        return
    if torch.cuda.is_initialized() and is_captured():  # type: ignore[no-untyped-call]
        raise UserError(
            "private training is being captured in a CUDA graph by hand: each replay would add the same noise, and no "
            "step would be accounted for; use dpscope.flash.make_graphed_step, which captures a private step"
        )

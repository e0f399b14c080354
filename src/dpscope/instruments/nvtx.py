"""Phases as NVTX ranges on the timelines of Nsight Systems and Nsight Compute; docs/nsys.md shows how to use them.

Outside `nvtx_phases` nothing is pushed. On builds of torch without CUDA, where `torch.cuda.nvtx` raises, ranges do
nothing, so that the same program runs everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dpscope.vocabulary.phases import listening


def nvtx_available() -> bool:
    return hasattr(torch._C, "_nvtx")


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Push a range of the calling thread. Ranges nest; a profiler shows the innermost at the bottom."""
    if not nvtx_available():
        yield
        return
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@contextmanager
def nvtx_phases(*, autograd: bool = False) -> Iterator[None]:
    """Push a range for every phase while the context is open; with `autograd`, one for every operator too."""
    emit = torch.autograd.profiler.emit_nvtx if autograd and nvtx_available() else nullcontext
    with listening(nvtx_range), emit():
        yield


class ProcessRanges:
    """Listener that makes phases ranges of the whole process, for a tool that sees only the launching thread.

    Autograd launches kernels from threads of its own, which push nothing. One range is open at a time: a phase within a
    phase closes the outer one and opens it again, so that a kernel belongs to the innermost.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._open: list[str] = []
        self._handle: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self._show_innermost()
        try:
            yield
        finally:
            self._open.pop()
            self._show_innermost()

    def _show_innermost(self) -> None:
        nvtx: Any = torch.cuda.nvtx
        if self._handle is not None:
            nvtx.range_end(self._handle)
        self._handle = nvtx.range_start(self._prefix + self._open[-1]) if self._open else None

"""Recordings of torch.profiler: as the text of a Chrome trace, and read in memory.

A profiler can be exported only once. Its in-memory events of GPU work hold the launch and the duration, but not the
start time.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import profile

from dpscope.errors import UserError
from dpscope.instruments.trace.events import ANNOTATION, MEMORY_EVENT, OPERATOR, Trace, parse_events

LAST_KEY = b'"traceName"'  # of the document that torch.profiler writes


def chrome_trace(profiler: profile) -> bytes:
    """Return the trace as JSON, once for each recording; torch writes it to a file in TMPDIR first.

    Raise `OSError` (no room) if the file is missing or incomplete, because torch.profiler reports no error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes() if path.exists() else b""
        if LAST_KEY not in text[-4096:] or not text.rstrip().endswith(b"}"):
            raise OSError(errno.ENOSPC, "torch.profiler could not write its trace", folder)
        return text


_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx
_KINDS = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}


def trace_from_profiler(profiler: profile) -> Trace:
    """Return what a profiler recorded. Raise `UserError` if it recorded nothing."""
    try:
        recorded = list(profiler.events() or [])  # type: ignore[no-untyped-call]
    except (AssertionError, AttributeError):
        recorded = []
    on_host = [each for each in recorded if each.device_type.name == "CPU" and not each.is_async]
    named = [each for each in on_host if each.name != MEMORY_EVENT and not _CALL.match(each.name)]
    if not named:
        raise UserError("the profiler has recorded nothing: run something in its `with` block, and leave the block")
    return parse_events([*(event for each in named for event in _chrome_events(each)), *_memory_events(on_host)])


def _chrome_events(each: Any) -> Iterator[dict[str, Any]]:
    """Yield the Chrome events of an operator or annotation and of what it launched, placed where it began."""
    begin = {"ph": "X", "ts": each.time_range.start, "pid": ""}
    args = {"External id": each.id, "Sequence number": each.sequence_nr}
    if each.input_shapes:
        args["Input Dims"] = each.input_shapes
    category = ANNOTATION if getattr(each, "is_user_annotation", False) else OPERATOR
    duration = each.time_range.elapsed_us()
    yield begin | {"name": each.name, "cat": category, "dur": duration, "tid": each.thread, "args": args}
    for kernel in each.kernels:
        kind = _KINDS.get(kernel.name.partition(" ")[0], "kernel")
        device = {"tid": f"device {kernel.device}", "args": {"External id": each.id}}
        yield begin | device | {"name": kernel.name, "cat": kind, "dur": kernel.duration}


def _memory_events(on_host: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield what each operator itself allocated and freed, as one change at its end; totals since the start."""
    totals = [0, 0]
    for order, each in enumerate(sorted(on_host, key=lambda event: event.time_range.end)):
        for device, size in enumerate((each.self_cpu_memory_usage, each.self_device_memory_usage)):
            if size:
                totals[device] += size
                args = {"Bytes": size, "Total Allocated": totals[device], "Device Type": device, "Ev Idx": order}
                yield {"name": MEMORY_EVENT, "ts": each.time_range.end, "pid": "", "tid": each.thread, "args": args}

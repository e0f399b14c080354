"""Recording of steps with torch.profiler: phases and modules as ranges, one small file a cycle of the schedule.

A profiler can be exported only once. Its in-memory events of GPU work hold the launch and the duration, but not the
start time.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from dpscope.errors import UserError
from dpscope.instruments.module_hooks import module_hooks
from dpscope.instruments.timing import Progress, Step, no_progress
from dpscope.instruments.trace.events import ANNOTATION, MEMORY_EVENT, OPERATOR, Trace, parse_events
from dpscope.vocabulary.instruments import Schedule
from dpscope.vocabulary.phases import listening

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


WAIT = "wait for the GPU"  # our own synchronisation at the end of a step: none of the step's
RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
MODULE = "module: "  # before a module's name, in the name of its range


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Details that the profiler records beside names and times. Each makes the trace larger and the step slower."""

    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    modules: bool = False
    flops: bool = False


@dataclass(frozen=True)
class Recording:
    """The files of a recording, one a cycle, and the floating-point operations of an average step."""

    paths: list[Path]
    flops: dict[str, float] = field(default_factory=dict)  # operator -> FLOPs in a step


def record(
    step: Step,
    folder: Path,
    *,
    device: str,
    schedule: Schedule,
    detail: Detail | None = None,
    model: nn.Module | None = None,
    progress: Progress = no_progress,
) -> Recording:
    """Run `step` as often as the schedule says and write what was recorded to `folder`.

    On CUDA every step ends with a synchronisation in a range of its own, so that all the work a step launched lies
    within it: a step's wall time is then GPU busy time plus GPU idle time.
    """
    detail = detail or Detail()
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    flops: dict[str, float] = {}

    def keep(profiler: profile) -> None:
        number = f"-{len(paths) + 1}" if paths else ""
        paths.append(export_trace(profiler, folder / f"trace{number}.json.gz"))
        if detail.flops:
            steps = schedule.repeat * schedule.active
            for row in profiler.key_averages():
                if row.flops:
                    flops[row.key] = flops.get(row.key, 0.0) + row.flops / steps

    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])],
        schedule=schedule.to_torch(),
        on_trace_ready=keep,
        record_shapes=detail.shapes or detail.flops,  # operations are worked out from shapes
        profile_memory=detail.memory,
        with_stack=detail.stacks,
        with_flops=detail.flops,
    )
    ranges = module_ranges(model) if detail.modules and model is not None else contextlib.nullcontext()
    with listening(record_function), ranges, profiler:
        for done in range(schedule.steps):
            step()
            if device == "cuda":
                with record_function(WAIT):
                    torch.cuda.synchronize()
            profiler.step()
            if profiler.current_action not in RECORDING:  # telling of progress takes time too
                progress("traced step", done + 1, schedule.steps)
    return Recording(paths, flops)


def export_trace(profiler: profile, path: Path) -> Path:
    """Write a Chrome trace, gzipped, without this machine's name and folders in its head."""
    text = chrome_trace(profiler)
    text = re.sub(rb'"(host_name|traceName)": "[^"]*"', rb'"\1": ""', text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, compresslevel=6, mtime=0))
    return path


@contextlib.contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Push a range around every submodule's forward pass, named by its path."""
    open_ranges: list[record_function] = []

    def enter(name: str) -> None:
        if name:  # the model itself has no range
            open_ranges.append(record_function(MODULE + name))
            open_ranges[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(name: str, *_: object) -> None:
        if name and open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    with module_hooks(model, before=enter, after=leave, always=True):
        yield

"""Recording of steps with torch.profiler: phases and modules as ranges, one small file a cycle of the schedule."""

from __future__ import annotations

import contextlib
import gzip
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from dpscope.instruments.module_hooks import module_hooks
from dpscope.instruments.timing import Progress, Step, no_progress
from dpscope.instruments.trace.chrome import chrome_trace
from dpscope.vocabulary.instruments import Schedule
from dpscope.vocabulary.phases import listening

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
            _add_flops(flops, profiler, schedule.repeat * schedule.active)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    profiler = profile(
        activities=activities,
        schedule=schedule.to_torch(),
        on_trace_ready=keep,
        record_shapes=detail.shapes or detail.flops,  # operations are worked out from shapes
        profile_memory=detail.memory,
        with_stack=detail.stacks,
        with_flops=detail.flops,
    )
    ranges = module_ranges(model) if detail.modules and model is not None else contextlib.nullcontext()
    with listening(_phase_range), ranges, profiler:
        for done in range(schedule.steps):
            step()
            if device == "cuda":
                with record_function(WAIT):
                    torch.cuda.synchronize()
            profiler.step()
            if profiler.current_action not in RECORDING:  # telling of progress takes time too
                progress("traced step", done + 1, schedule.steps)
    return Recording(paths, flops)


def _phase_range(name: str) -> AbstractContextManager[object]:
    range_: AbstractContextManager[object] = record_function(name)
    return range_


def export_trace(profiler: profile, path: Path) -> Path:
    """Write a Chrome trace, gzipped, without this machine's name and folders in its head."""
    text = chrome_trace(profiler)
    text = re.sub(rb'"(host_name|traceName)": "[^"]*"', rb'"\1": ""', text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, compresslevel=6, mtime=0))
    return path


def _add_flops(flops: dict[str, float], profiler: profile, steps: int) -> None:
    for row in profiler.key_averages():
        if row.flops:
            flops[row.key] = flops.get(row.key, 0.0) + row.flops / steps


@contextlib.contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Push a range around every submodule's forward pass, named by its path."""
    open_ranges: list[record_function] = []

    def enter(name: str) -> None:
        open_ranges.append(record_function(MODULE + name))
        if name:  # the model itself has no range
            open_ranges[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(name: str, *_: object) -> None:
        if open_ranges:
            range_ = open_ranges.pop()
            if name:
                range_.__exit__(None, None, None)

    with module_hooks(model, before=enter, after=leave, always=True):
        yield

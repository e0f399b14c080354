"""The frame of the programs to practise on: a command line, right timing, and marks that ncu and nsys can see.

A program does the same work in several ways, named a, b, c. The first wastes something, the others do not: what it
is, `solutions/cases.md` says. The timed steps lie between `cudaProfilerStart` and `cudaProfilerStop`, and each
is an NVTX range named `step`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpscope.instruments.nvtx import nvtx_range
from dpscope.instruments.timing import time_steps
from dpscope.instruments.trace import Detail, record
from dpscope.vocabulary.instruments import Schedule

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One case: a task, and ways to do it."""

    name: str
    task: str
    ways: dict[str, Callable[[str, int], Step]]  # name -> from device and size to a step
    sizes: dict[str, int]  # device -> size
    needs_cuda: tuple[str, ...] = ()  # ways that mean nothing on a CPU
    work: Callable[[str, int], dict[str, float]] = field(default=lambda way, size: {})  # bytes and flops of a step

    @property
    def problem(self) -> str:
        """Return the way that has the problem."""
        return next(iter(self.ways))

    def ways_on(self, device: str) -> list[str]:
        return [way for way in self.ways if device == "cuda" or way not in self.needs_cuda]

    def measure(
        self, way: str, *, device: str | None = None, size: int | None = None, warmup: int = 5, steps: int = 20
    ) -> dict[str, Any]:
        """Time one way: median and every step in milliseconds, and what the step moves and computes."""
        device = device or device_here()
        size = size or self.sizes[device]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step = self.ways[way](device, size)
        for _ in range(warmup):
            step()

        def marked() -> None:
            with nvtx_range("step"):
                step()

        with captured(device):
            timing = time_steps(marked, device=device, warmup=0, steps=steps)
        return {
            "program": self.name,
            "way": way,
            "device": device,
            "hardware": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "torch": torch.__version__,
            "size": size,
            "median_ms": timing.median_ms,
            "step_ms": timing.step_ms,
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            **self.work(way, size),
        }

    def record(self, way: str, folder: Path, *, device: str | None = None, size: int | None = None) -> Path:
        """Record two steps of one way with torch.profiler; the trace opens in Perfetto."""
        device = device or device_here()
        step = self.ways[way](device, size or self.sizes[device])
        schedule = Schedule(skip_first=5, warmup=1, active=2)
        return record(step, folder, device=device, schedule=schedule, detail=Detail(shapes=True)).paths[0]


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def captured(device: str) -> Iterator[None]:
    """Mark the stretch that `ncu --profile-from-start off` and `nsys --capture-range=cudaProfilerApi` look at."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def run(program: Program) -> None:
    """Run the command line of a program."""
    parser = argparse.ArgumentParser(description=program.task)
    parser.add_argument("--way", default=program.problem, choices=[*program.ways, "all"], help="how to do the task")
    parser.add_argument("--device", default=device_here(), choices=["cpu", "cuda"])
    parser.add_argument("--size", type=int, help=f"of the problem [default: {program.sizes}]")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write what was measured there, a file a way")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="record two steps with torch.profiler instead")
    asked = parser.parse_args()
    for way in program.ways_on(asked.device) if asked.way == "all" else [asked.way]:
        if way not in program.ways_on(asked.device):
            parser.error(f"--way {way} shows something of a GPU: it needs --device cuda")
        if asked.trace:
            path = program.record(way, asked.trace / f"{program.name}-{way}", device=asked.device, size=asked.size)
            print(f"{program.name} {way}: {path}")
            continue
        measured = program.measure(way, device=asked.device, size=asked.size, steps=asked.steps)
        print(describe(measured))
        if asked.json:
            asked.json.mkdir(parents=True, exist_ok=True)
            text = json.dumps(measured, indent=1)
            (asked.json / f"{program.name}-{way}.json").write_text(text + "\n", encoding="utf-8")


def describe(measured: dict[str, Any]) -> str:
    """Return one line: step time, and the rates that its bytes and operations come to."""
    seconds = measured["median_ms"] / 1e3
    fastest = min(measured["step_ms"])
    parts = [f"{measured['median_ms']:.3f} ms a step (fastest {fastest:.3f}, {len(measured['step_ms'])} steps)"]
    if "bytes" in measured:
        parts.append(f"{measured['bytes'] / seconds / 1e9:,.0f} GB/s")
    if "flops" in measured:
        parts.append(f"{measured['flops'] / seconds / 1e12:,.3g} TFLOP/s")
    return f"{measured['program']} {measured['way']}: {', '.join(parts)} on {measured['hardware']}"


def speedup(slow: dict[str, Any], fast: dict[str, Any]) -> float:
    """Return how many times faster the second is, by medians."""
    return statistics.median(slow["step_ms"]) / statistics.median(fast["step_ms"])

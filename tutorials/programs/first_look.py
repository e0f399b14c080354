"""Four measurements for the first tutorial: timing, sizes, copies and streams. `python first_look.py --json FILE`
keeps them.

They work on a CPU as well, where nothing is asynchronous and no link is crossed; what only a GPU shows is then left
out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from practice import device_here
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dpscope.instruments.timing import time_steps

REPEATS = 20


def three_clocks(device: str, side: int) -> dict[str, float]:
    """Time one matrix product by a clock without waiting, by a clock with waiting, and by time_steps, in ms."""
    a = torch.randn(side, side, device=device)

    def product() -> Tensor:
        return a @ a

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        product()
    wait()
    without, waiting = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        product()
        without.append(1e3 * (time.perf_counter() - began))  # the launch, not the product
        wait()
        began = time.perf_counter()
        product()
        wait()
        waiting.append(1e3 * (time.perf_counter() - began))
    return {
        "side": side,
        "without_waiting_ms": statistics.median(without),
        "waiting_ms": statistics.median(waiting),
        "events_ms": time_steps(product, device=device, warmup=3, steps=REPEATS).median_ms,
    }


def ordering(device: str, side: int) -> list[dict[str, float | str]]:
    """Return what the host does to order one product: its slowest calls, in milliseconds a product."""
    a = torch.randn(side, side, device=device)
    _ = a @ a
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as recording:
        for _ in range(REPEATS):
            _ = a @ a
            if device == "cuda":
                torch.cuda.synchronize()
    rows = sorted(recording.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return [{"call": row.key, "ms": row.self_cpu_time_total / 1e3 / REPEATS} for row in rows[:6]]


def time_by_size(device: str, exponents: range, calls: int = 1) -> list[dict[str, float]]:
    """Time x + 1 for tensors of 2^n numbers, in ms: flat while launching dominates, then a line of bandwidth.

    Each timing holds `calls` of them: with many, the events that take the time no longer count.
    """
    found = []
    for n in exponents:
        x = torch.randn(2**n, device=device)
        y = torch.empty_like(x)

        def step(x: Tensor = x, y: Tensor = y) -> None:
            for _ in range(calls):
                torch.add(x, 1, out=y)

        timing = time_steps(step, device=device, warmup=3, steps=REPEATS)
        found.append({"numbers": 2**n, "bytes": 8 * 2**n, "median_ms": timing.median_ms / calls})
    return found


def copies(size: int) -> dict[str, float]:
    """Return bytes a second between host and device, from pageable and pinned memory, and within the device."""
    pageable = torch.randint(255, (size,), dtype=torch.uint8)
    pinned = pageable.pin_memory()
    here, there = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    routes: dict[str, tuple[Tensor, Tensor]] = {
        "H2D pageable": (here, pageable),
        "H2D pinned": (here, pinned),
        "D2H pageable": (pageable, here),
        "D2H pinned": (pinned, here),
        "D2D": (there, here),
    }
    found = {}
    for name, (target, source) in routes.items():
        timing = time_steps(lambda t=target, s=source: t.copy_(s, non_blocking=True), device="cuda", warmup=3, steps=10)
        found[name] = size / (timing.median_ms / 1e3)  # for D2D each byte is read and written
    return found


def two_streams(side: int) -> dict[str, float]:
    """Return milliseconds of the same small products on one stream, and on two."""
    operands = [torch.randn(side, side, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in operands]

    def on_one() -> None:
        for _ in range(20):
            for a in operands:
                _ = a @ a

    def on_two() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(20):
            for a, stream in zip(operands, streams, strict=True):
                with torch.cuda.stream(stream):
                    _ = a @ a
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def graphed(run: Callable[[], None]) -> float:
        """Time it replayed as a graph, so that the host's launching is no part of it."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return time_steps(graph.replay, device="cuda", warmup=3, steps=REPEATS).median_ms

    return {"side": side, "one_stream_ms": graphed(on_one), "two_streams_ms": graphed(on_two)}


def range_us() -> float:
    """Return the microseconds that one NVTX range (push and pop) costs while no profiler is attached."""
    began = time.perf_counter()
    for _ in range(10_000):
        torch.cuda.nvtx.range_push("x")
        torch.cuda.nvtx.range_pop()
    return 1e6 * (time.perf_counter() - began) / 10_000


def look(device: str) -> dict[str, Any]:
    """Return all of it, in a few seconds."""
    on_gpu = device == "cuda"
    found: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "three_clocks": three_clocks(device, 8192 if on_gpu else 512),
        "time_by_size": time_by_size(device, range(8, 30) if on_gpu else range(8, 23, 2)),
    }
    if on_gpu:
        found |= {
            "copies": copies(2**28),
            "two_streams": two_streams(512),
            "time_by_size_of_50": time_by_size(device, range(8, 28), calls=50),
            "ordering": ordering(device, 8192),
            "nvtx_range_us": range_us(),
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=device_here(), choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    text = json.dumps(look(asked.device), indent=1)
    print(text)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(text + "\n", encoding="utf-8")

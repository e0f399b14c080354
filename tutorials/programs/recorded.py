"""Recordings of an NVIDIA H200: for the lessons to show, and for the check of the numbers and claims in their prose.

One place for all of them: sweeps (`sweeps.py`), kernels under ncu (`kernels.py`), and here cases, traces, tables,
ranks, the card and timelines of nsys.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

from kernels import (
    counter,
    counters,
    details,
    duration_us,
    estimated_speedups,
    kernel_on_roofline,
    l2_bytes,
    launches,
    metric,
    of_roof,
    pipes,
    ridge,
    sectors_a_request,
    source_table,
    stall_percent,
    stalls,
    strided_times,
)
from recordings import NOT_RECORDED, folder, kept, output, read_json
from sweeps import (
    RESULTS,
    ROOT,
    captured,
    ceilings,
    component_gib,
    dram_gb,
    dram_times,
    gib,
    memory_times,
    ms,
    row,
    sweep,
    there,
    times,
    traced,
)

from dpscope.instruments.nsys.reading import CapturedTimeline, read_timeline
from dpscope.instruments.nsys.views import levels, link

__all__ = [
    "NOT_RECORDED",
    "RESULTS",
    "ROOT",
    "bend_bytes",
    "busy_percent",
    "captured",
    "card_over_time",
    "ceilings",
    "component_gib",
    "coolest",
    "copies_gb_per_second",
    "counter",
    "counters",
    "details",
    "dram_gb",
    "dram_times",
    "duration_us",
    "estimated_speedups",
    "first_look",
    "folder",
    "gib",
    "hottest",
    "kept",
    "kernel_on_roofline",
    "l2_bytes",
    "launch_us",
    "launches",
    "live_bytes",
    "memory_times",
    "metric",
    "ms",
    "of_roof",
    "output",
    "pipes",
    "program",
    "rank",
    "rank_trace",
    "read_json",
    "ridge",
    "row",
    "sectors_a_request",
    "source_table",
    "stall_percent",
    "stalls",
    "strided_times",
    "sweep",
    "table",
    "there",
    "timeline",
    "times",
    "took",
    "totals",
    "trace_of",
    "trace_summary",
    "traced",
]


def first_look() -> dict[str, Any] | None:
    """Return the measurements of first_look.py on the H200."""
    return read_json("first_look.json")


def program(name: str, way: str) -> dict[str, Any] | None:
    """Return one way of a case, measured on the H200."""
    return read_json(f"{name}-{way}.json")


def took(name: str, way: str = "a") -> float:
    """Return the milliseconds of a step of a case on the H200."""
    return float(there(program(name, way))["median_ms"])


def launch_us() -> float:
    """Return the microseconds that a small x + 1 costs in a loop, timed 50 at a time."""
    return 1e3 * float(there(first_look())["time_by_size_of_50"][0]["median_ms"])


def bend_bytes() -> float:
    """Return the size at which moving the bytes of x + 1 takes as long as launching it."""
    return launch_us() / 1e6 * float(ceilings()["dram_bytes_per_second"])


def trace_of(name: str, way: str) -> Path | None:
    """Return the torch.profiler trace of one way of a case."""
    return kept(f"traces/{name}-{way}/trace.json.gz")


@cache
def trace_summary(name: str, way: str) -> dict[str, Any]:
    """Return what dpscope reads from the trace of a case: busy, idle, waits."""
    from dpscope.instruments.trace import read_trace, summarise

    return summarise([read_trace(there(trace_of(name, way)))])


def table(name: str) -> str:
    """Return a table that torch.profiler printed on the H200, as it was printed."""
    path = kept(f"tables/{name}.txt")
    return path.read_text(encoding="utf-8") if path else NOT_RECORDED


def totals(name: str) -> dict[str, float]:
    """Return torch.profiler's totals of the network of lesson 2 on the H200."""
    return dict(there(read_json(f"tables/{name}-totals.json")))


def live_bytes(way: str) -> list[int]:
    """Return the memory that is live after each step of case 10 on the H200."""
    return list(there(read_json("case_10-live.json"))[way])


def rank(parallel: str, number: int = 0) -> dict[str, Any] | None:
    """Return what one rank of two measured, on gloo, both ranks on the one H200."""
    return read_json(f"ranks/{parallel}-rank{number}.json")


def rank_trace(parallel: str, number: int = 0) -> Path | None:
    return kept(f"ranks/{parallel}-rank{number}.trace.json.gz")


def card_over_time() -> list[dict[str, str]]:
    """Return what nvidia-smi said about the H200 every quarter of a second: idle, multiplying, copying."""
    path = kept("nvidia-smi.csv")
    if path is None:
        return []
    with path.open(encoding="utf-8") as file:
        whole = [line for line in csv.DictReader(file) if None not in line.values()]  # the last may be cut off
    return [{name.strip(): value.strip() for name, value in line.items()} for line in whole]


def hottest(column: str) -> float:
    """Return the highest value of a column of nvidia-smi's log, by the beginning of its name."""
    return max(float(line[name]) for line in card_over_time() for name in line if name.startswith(column))


def coolest(column: str) -> float:
    """Return the lowest value of a column of nvidia-smi's log."""
    return min(float(line[name]) for line in card_over_time() for name in line if name.startswith(column))


def timeline(report: str) -> CapturedTimeline | None:
    """Return a capture of nsys, stripped of what it says about the machine."""
    path = kept(f"{report}.sqlite")
    return read_timeline(path) if path else None


def busy_percent(report: str) -> float:
    """Return how much of a capture the GPU was busy."""
    return levels(there(timeline(report)))["GPU busy, % of the capture"]


def copies_gb_per_second(report: str) -> float:
    """Return how fast a capture's copies to the device were while they ran."""
    table = link(there(timeline(report))).set_index("direction")
    return float(table.loc["Host-to-Device", "gb_per_second"])

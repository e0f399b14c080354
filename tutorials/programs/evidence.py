"""Evidence for the hunt of lesson 7: what a trace of a case says, without saying what is wrong."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import recorded
from language import say
from practice import Program

from dpscope.instruments.trace import read_trace, summarise


def trace_of(program: Program, way: str = "a") -> tuple[Path, str]:
    """Return the H200's trace of a way of a case, or one recorded here, and where it is from."""
    kept = recorded.trace_of(program.name, way)
    if kept:
        return kept, "H200"
    return program.record(way, Path(tempfile.mkdtemp())), say("this machine", "本机")


def longest(path: Path, kinds: tuple[str, ...], most: int = 5) -> list[tuple[str, int, float]]:
    """Return the events of some kinds with the most time in all: name, count, milliseconds."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    time, count = Counter[str](), Counter[str]()
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in kinds:
            time[event["name"]] += event["dur"] / 1e3
            count[event["name"]] += 1
    return [(name, count[name], ms) for name, ms in time.most_common(most)]


def show(program: Program, way: str = "a") -> None:
    """Print what a trace of two steps shows: the GPU's time, waits, and the longest calls and kernels."""
    path, where = trace_of(program, way)
    seen = summarise([read_trace(path)])
    print(f"{program.name} {way} ({program.task}), {where}: {seen['step_ms']:.2f} ms a traced step")
    if "gpu" in seen:
        gpu = seen["gpu"]
        print(f"  GPU busy {gpu['busy_ms']:.2f} ms, idle {gpu['idle_ms']:.2f} ms; {gpu['kernels']:.0f} kernels")
    for wait in seen["synchronisations"][:3]:
        print(f"  {wait['count']:.0f} × {wait['call']} by {wait['operator']}: {wait['ms']:.2f} ms")
    for title, kinds in (
        (say("longest operators (host, two steps)", "最长的算子（主机，两步）"), ("cpu_op",)),
        (
            say("longest kernels and copies (GPU, two steps)", "最长的 kernel 和拷贝（GPU，两步）"),
            ("kernel", "gpu_memcpy"),
        ),
    ):
        if found := longest(path, kinds):
            print(f"  {title}:")
            for name, count, ms in found:
                print(f"    {ms:9.2f} ms {count:5} × {name[:84]}")

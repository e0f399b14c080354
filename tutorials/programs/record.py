"""Record on this machine what the lessons show of torch.profiler and of the cases: `python programs/record.py FOLDER`.

One process, so that torch is imported once. A part that fails says so and does not stop the rest; the exit status then
is 1.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cnn import NORMALISE, make_step
from first_look import look
from practice import Program, describe, device_here
from torch.profiler import ProfilerActivity, profile

from dpscope.instruments.timing import time_steps

CASES = [f"case_{number}" for number in range(1, 11)]
TRACED = {"case_2": "a", "case_3": "abc"} | {f"case_{number}": "ab" for number in (4, 6, 7, 8, 9)}
SMI = "timestamp,temperature.gpu,power.draw,clocks.sm,utilization.gpu,pcie.link.gen.current,pcie.link.width.current"


def program(name: str) -> Program:
    return importlib.import_module(name).PROGRAM


def tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def keep(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def measure(name: str, folder: Path) -> None:
    """Time every way of a case."""
    for way in program(name).ways_on(device_here()):
        tidy()
        measured = program(name).measure(way, steps=10 if name == "case_10" else 20)
        print(" ", describe(measured))
        keep(folder / f"{name}-{way}.json", measured)


def trace(name: str, way: str, folder: Path) -> None:
    """Trace two steps of a way of a case."""
    if way in program(name).ways_on(device_here()):
        tidy()
        program(name).record(way, folder / "traces" / f"{name}-{way}")


def live_bytes(folder: Path) -> None:
    """Record live memory after each step of case 10."""
    found: dict[str, list[int]] = {}
    for way in program("case_10").ways if torch.cuda.is_available() else ():
        tidy()
        step = program("case_10").ways[way]("cuda", program("case_10").sizes["cuda"])
        found[way] = []
        for _ in range(12):
            step()
            found[way].append(torch.cuda.memory_allocated())
    keep(folder / "case_10-live.json", found)


def native_tables(folder: Path) -> None:
    """Record the CNN of lesson 2 and write down torch.profiler's own tables, before and after its fix."""
    device = device_here()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    timed = {}
    for name, normalise in NORMALISE.items():
        step = make_step(normalise, device)
        timed[name] = time_steps(step, device=device, warmup=5, steps=30).median_ms
        with profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True) as recording:
            for _ in range(3):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
        averages, shaped = recording.key_averages(), recording.key_averages(group_by_input_shape=True)
        memory = f"self_{'device' if device == 'cuda' else 'cpu'}_memory_usage"
        for table, rows, column in (
            ("by-device-time", averages, "self_device_time_total"),
            ("by-host-time", averages, "cpu_time_total"),
            ("by-memory", averages, memory),
            ("by-shape", shaped, "self_device_time_total"),
        ):
            text = rows.table(sort_by=column, row_limit=10, max_name_column_width=40, max_shapes_column_width=48)
            keep(folder / "tables" / f"{name}-{table}.txt", text)
        total = averages.total_average()
        keep(
            folder / "tables" / f"{name}-totals.json",
            {
                "median_ms": timed[name],
                "events": len(recording.events()),
                "calls": sum(row.count for row in averages),
                "self_cpu_ms": total.self_cpu_time_total / 1e3,
                "self_device_ms": total.self_device_time_total / 1e3,
            },
        )
        traces = folder / "traces" / f"cnn-{name}"
        traces.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(traces / "trace.json.gz"))


def under_load(folder: Path) -> None:
    """Watch the card with nvidia-smi, first idle, then multiplying matrices, then copying to it."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,nounits", "-lms", "250"]
    with (folder / "nvidia-smi.csv").open("w", encoding="utf-8") as log:
        watching = subprocess.Popen(command, stdout=log)
        try:
            time.sleep(1.5)
            a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
            began = time.monotonic()
            while time.monotonic() - began < 4:
                for _ in range(50):
                    a @ a
                torch.cuda.synchronize()
            pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
            there = torch.empty_like(pinned, device="cuda")
            began = time.monotonic()
            while time.monotonic() - began < 2:
                there.copy_(pinned, non_blocking=True)
                torch.cuda.synchronize()
        finally:
            watching.terminate()
            watching.wait(5)


def parts(folder: Path) -> dict[str, Callable[[], None]]:
    """Return everything to record, by name."""
    every: dict[str, Callable[[], None]] = {
        "first look": lambda: keep(folder / "first_look.json", look(device_here())),
        "torch's tables": lambda: native_tables(folder),
        "live memory": lambda: live_bytes(folder),
    }
    for name in [*CASES, "per_sample_norms"]:
        every[name] = lambda name=name: measure(name, folder)  # type: ignore[misc]
    for name, ways in TRACED.items():
        for way in ways:
            every[f"trace of {name} {way}"] = lambda name=name, way=way: trace(name, way, folder)  # type: ignore[misc]
    if torch.cuda.is_available():
        every["nvidia-smi"] = lambda: under_load(folder)
    return every


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, part in parts(folder).items():
        began = time.monotonic()
        try:
            part()
        except Exception:
            failed.append(name)
            traceback.print_exc()
        tidy()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    print("failed:", ", ".join(failed) or "nothing")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

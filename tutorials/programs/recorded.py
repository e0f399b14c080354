"""What was recorded on an NVIDIA H200: for the tutorials to show, and for the check of the numbers in their prose.

Sweeps lie in `benchmarks/results/`; what `run_on_gpu.sh` left lies in the newest `*-h200-tutorials` there.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from dpscope import Comparison
from dpscope.instruments.ncu.details import KernelDetails, read_details
from dpscope.instruments.ncu.reading import Action, parse_raw_csv
from dpscope.instruments.nsys.reading import CapturedTimeline, read_timeline
from dpscope.instruments.nsys.views import levels, link
from dpscope.reports.memory.data import composition_of
from dpscope.reports.tables import Row

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DAY = "2026-11-15"
PROGRESS = "[1/1] ["  # of nsys, line by line
NOT_RECORDED = "not recorded: run tutorials/programs/run_on_gpu.sh on a GPU"


@cache
def sweep(name: str) -> Comparison:
    """A sweep by its short name: `page`, `traffic`, `flash-grid/bf16-1024`."""
    return Comparison.read(RESULTS / f"{DAY}-h200-{name}")


def row(name: str, method: str, batch: int = 8, seq: int | None = 1024, model: str = "1b") -> Row:
    """One method at one size of a sweep."""
    wanted = (method, batch, seq, model)
    for each in sweep(name).rows:
        if (each.method, each.spec["batch_size"], each.spec.get("seq_len"), each.field("model")) == wanted:
            return each
    raise LookupError(f"no {wanted} in {name}")


def ms(*which: Any, **more: Any) -> float:
    """Milliseconds of a step, the median."""
    return _there(row(*which, **more).median_ms)


def times(*which: Any, **more: Any) -> float:
    """Time as a multiple of standard's."""
    return _there(row(*which, **more).time_ratio)


def gib(*which: Any, **more: Any) -> float:
    """Peak memory in GiB."""
    return _there(row(*which, **more).peak_bytes) / 2**30


def memory_times(*which: Any, **more: Any) -> float:
    """Peak memory as a multiple of standard's."""
    return _there(row(*which, **more).memory_ratio)


def component_gib(component: str, *which: Any, **more: Any) -> float:
    """A component of the peak, in GiB."""
    return _there(composition_of(row(*which, **more))).components.get(component, 0) / 2**30


def dram_gb(*which: Any, **more: Any) -> float:
    """Bytes that a step reads from and writes to DRAM, in GB (10⁹)."""
    seen = _there(row(*which, **more).measured["ncu"].ncu)["traffic"]
    return (seen["dram_read_bytes"] + seen["dram_write_bytes"]) / 1e9


def dram_times(name: str, method: str, *size: int) -> float:
    """DRAM bytes as a multiple of standard's."""
    return dram_gb(name, method, *size) / dram_gb(name, "standard", *size)


def traced(name: str, method: str, *size: int) -> dict[str, Any]:
    """What torch.profiler saw of a step."""
    return _there(row(name, method, *size).measured["trace"].trace)


def captured(name: str, method: str, *size: int) -> dict[str, Any]:
    """What Nsight Systems saw of a step."""
    return _there(row(name, method, *size).measured["nsys"].nsys)


def ceilings(name: str = "traffic") -> dict[str, Any]:
    """What the H200 reaches at its best: bytes and operations a second."""
    counted = [each.measured["ncu"].ncu for each in sweep(name).rows if "ncu" in each.measured]
    return next(dict(seen["ceilings"]) for seen in counted if seen and seen.get("ceilings"))


def _there(value: Any) -> Any:
    if value is None:
        raise LookupError("it was not measured")
    return value


# -- what run_on_gpu.sh left -------------------------------------------------------------------------------------------


def folder() -> Path | None:
    return max(RESULTS.glob("*-h200-tutorials"), default=None)


def _kept(name: str) -> Path | None:
    path = (folder() or RESULTS) / "recorded" / name
    return path if path.is_file() and path.stat().st_size else None


def output(command: str, *, first: int = 0, last: int | None = None) -> str:
    """What a command of gpu_commands.txt printed on the H200, by its name; lines `first` to `last`."""
    path = (folder() or RESULTS) / "output" / f"{command}.txt"
    if not path.is_file():
        return NOT_RECORDED
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(PROGRESS)]
    return "\n".join(lines[first:last])


def first_look() -> dict[str, Any] | None:
    """The measurements of first_look.py on the H200."""
    path = _kept("first_look.json")
    return json.loads(path.read_text(encoding="utf-8")) if path else None


def program(name: str, way: str) -> dict[str, Any] | None:
    """One way of a program to practise on, measured on the H200."""
    path = _kept(f"{name}-{way}.json")
    return json.loads(path.read_text(encoding="utf-8")) if path else None


def trace_of(name: str, way: str) -> Path | None:
    """The torch.profiler trace of one way of a program."""
    return _kept(f"traces/{name}-{way}/trace.json.gz")


def details(report: str) -> KernelDetails | None:
    """The Details page of a report of ncu."""
    path = _kept(f"{report}.details.csv")
    return read_details(path)[0] if path else None


def counters(report: str) -> Action | None:
    """Every counter of a report of ncu, in base units."""
    path = _kept(f"{report}.raw.csv")
    return parse_raw_csv(path.read_text(encoding="utf-8"))[0] if path else None


# Tensor-core operations by the algorithm: a product of 4096³; both Gram products on and below the diagonal, in tiles of
# 128, for 8 samples of 1024 positions and 2048 features.
TENSOR_FLOPS = {"tensor_cores": 2 * 4096**3, "gram": 2 * 2 * 2048 * 8 * (36 * 128**2)}


def kernel_on_roofline(report: str) -> dict[str, float] | None:
    """Operations, bytes of DRAM and seconds of a profiled kernel."""
    seen = counters(report)
    if seen is None:
        return None
    count = seen.metrics
    prefix = "smsp__sass_thread_inst_executed_op_"
    fp32 = sum(
        weight * count.get(f"{prefix}{operation}_pred_on.sum.per_cycle_elapsed", 0)
        for operation, weight in (("fadd", 1), ("fmul", 1), ("ffma", 2))
    )
    cycles = count.get("smsp__cycles_elapsed.max") or count.get("smsp__cycles_elapsed.avg", 0)
    nbytes = count.get("dram__bytes.sum") or count.get("dram__bytes_read.sum", 0) + count.get(
        "dram__bytes_write.sum", 0
    )
    flops = TENSOR_FLOPS.get(report) or fp32 * cycles
    return {"flops": flops, "bytes": nbytes, "seconds": count["gpu__time_duration.sum"] / 1e9} if flops else None


def timeline(report: str) -> CapturedTimeline | None:
    """A capture of nsys, stripped of what it says about the machine."""
    path = _kept(f"{report}.sqlite")
    return read_timeline(path) if path else None


def busy_percent(report: str) -> float:
    """How much of a capture the GPU was busy."""
    return levels(_there(timeline(report)))["GPU busy, % of the capture"]


def copies_gb_per_second(report: str) -> float:
    """How fast a capture's copies to the device were while they ran."""
    table = link(_there(timeline(report))).set_index("direction")
    return float(table.loc["Host-to-Device", "gb_per_second"])

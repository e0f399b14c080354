"""Recordings of an NVIDIA H200: for the lessons to show, and for the check of the numbers and claims in their prose.

Sweeps lie in `benchmarks/results/`; what `run_on_gpu.sh` left lies in the newest `*-h200-tutorials` there.
"""

from __future__ import annotations

import csv
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
TODAY = "2026-11-16"  # of what was measured again with the current version
PROGRESS = "[1/1] ["  # of nsys, line by line
NOT_RECORDED = "not recorded: run tutorials/programs/run_on_gpu.sh on a GPU"


@cache
def sweep(name: str, day: str = DAY) -> Comparison:
    """Return a sweep by its short name: `page`, `traffic`, `flash-grid/bf16-1024`."""
    return Comparison.read(RESULTS / f"{day}-h200-{name}")


@cache
def price(row: str) -> dict[str, Any]:
    """Return a row of the table of prices of 2026-11-16, the current version: its ratios and its ordinary step."""
    for line in (RESULTS / f"{TODAY}-h200-price.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[0] == row and len(cells) == 7:
            standard, time, fastest, peak = cells[1], *(float(cell.rstrip("!")) for cell in cells[3:6])
            return {"standard_ms": float(standard.split()[0]), "time": time, "fastest": fastest, "memory": peak}
    raise LookupError(f"no row {row!r} in the table of prices")


def row(name: str, method: str, batch: int = 8, seq: int | None = 1024, model: str = "1b") -> Row:
    """Return one method at one size of a sweep."""
    wanted = (method, batch, seq, model)
    for each in sweep(name).rows:
        if (each.method, each.spec["batch_size"], each.spec.get("seq_len"), each.field("model")) == wanted:
            return each
    raise LookupError(f"no {wanted} in {name}")


def ms(*which: Any, **more: Any) -> float:
    """Return the milliseconds of a step, the median."""
    return _there(row(*which, **more).median_ms)


def times(*which: Any, **more: Any) -> float:
    """Return the time as a multiple of standard's."""
    return _there(row(*which, **more).time_ratio)


def gib(*which: Any, **more: Any) -> float:
    """Return the peak memory in GiB."""
    return _there(row(*which, **more).peak_bytes) / 2**30


def memory_times(*which: Any, **more: Any) -> float:
    """Return the peak memory as a multiple of standard's."""
    return _there(row(*which, **more).memory_ratio)


def component_gib(component: str, *which: Any, **more: Any) -> float:
    """Return a component of the peak, in GiB."""
    return _there(composition_of(row(*which, **more))).components.get(component, 0) / 2**30


def dram_gb(*which: Any, **more: Any) -> float:
    """Return the bytes that a step reads from and writes to DRAM, in GB (10⁹)."""
    seen = _there(row(*which, **more).measured["ncu"].ncu)["traffic"]
    return (seen["dram_read_bytes"] + seen["dram_write_bytes"]) / 1e9


def dram_times(name: str, method: str, *size: int) -> float:
    """Return the DRAM bytes as a multiple of standard's."""
    return dram_gb(name, method, *size) / dram_gb(name, "standard", *size)


def traced(name: str, method: str, *size: int) -> dict[str, Any]:
    """Return what torch.profiler saw of a step."""
    return _there(row(name, method, *size).measured["trace"].trace)


def captured(name: str, method: str, *size: int) -> dict[str, Any]:
    """Return what Nsight Systems saw of a step."""
    return _there(row(name, method, *size).measured["nsys"].nsys)


def ceilings(name: str = "traffic") -> dict[str, Any]:
    """Return what the H200 reaches at its best: bytes and operations a second."""
    counted = [each.measured["ncu"].ncu for each in sweep(name).rows if "ncu" in each.measured]
    return next(dict(seen["ceilings"]) for seen in counted if seen and seen.get("ceilings"))


def _there(value: Any) -> Any:
    if value is None:
        raise LookupError("it was not measured")
    return value


# -- what run_on_gpu.sh left -------------------------------------------------------------------------------------------


def folder() -> Path | None:
    return max(RESULTS.glob("*-h200-tutorials"), default=None)


_OLD = {  # TEMPORARY
    "case_1-a.json": "memory_bound-two_operators.json",
    "case_1-b.json": "memory_bound-one_operator.json",
    "case_2-a.json": "launch_bound-loop.json",
    "case_2-b.json": "launch_bound-foreach.json",
    "case_2-c.json": "launch_bound-graph.json",
    "case_3-a.json": "unpinned_copy-unpinned.json",
    "case_3-b.json": "unpinned_copy-pinned.json",
    "case_3-c.json": "unpinned_copy-prefetched.json",
    "case_4-a.json": "hidden_sync-norms_read_at_once.json",
    "case_4-b.json": "hidden_sync-norms_kept_on_device.json",
    "case_5-a.json": "compute_bound-float32.json",
    "case_5-b.json": "compute_bound-bfloat16.json",
    "addition.details.csv": "memory_bound.details.csv",
    "addition.raw.csv": "memory_bound.raw.csv",
    "product.details.csv": "compute_bound.details.csv",
    "product.raw.csv": "compute_bound.raw.csv",
    "case_4.sqlite": "hidden_sync.sqlite",
    "case_2.sqlite": "launch_bound.sqlite",
    "case_3.sqlite": "unpinned_copy.sqlite",
    "case_3_c.sqlite": "prefetched_copy.sqlite",
    "traces/case_4-a/trace.json.gz": "traces/hidden_sync-norms_read_at_once/trace.json.gz",
    "traces/case_2-a/trace.json.gz": "traces/launch_bound-loop/trace.json.gz",
    "traces/case_4-b/trace.json.gz": "traces/hidden_sync-norms_kept_on_device/trace.json.gz",
}


def _kept(name: str) -> Path | None:
    path = (folder() or RESULTS) / "recorded" / name
    if not path.is_file():
        path = (
            path.with_name(Path(_OLD.get(name, name)).name)
            if "traces" not in name
            else path.parents[2] / _OLD.get(name, name)
        )
    return path if path.is_file() and path.stat().st_size else None


def output(command: str, *, first: int = 0, last: int | None = None) -> str:
    """Return what a command of gpu_commands.txt printed on the H200, by its name; lines `first` to `last`."""
    path = (folder() or RESULTS) / "output" / f"{command}.txt"
    if not path.is_file():
        return NOT_RECORDED
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(PROGRESS)]
    return "\n".join(lines[first:last])


def first_look() -> dict[str, Any] | None:
    """Return the measurements of first_look.py on the H200."""
    return _json("first_look.json")


def _json(name: str) -> Any:
    path = _kept(name)
    return json.loads(path.read_text(encoding="utf-8")) if path else None


def program(name: str, way: str) -> dict[str, Any] | None:
    """Return one way of a case, measured on the H200."""
    kept = _json(f"{name}-{way}.json")
    return kept and kept | {"program": name, "way": way}


def took(name: str, way: str = "a") -> float:
    """Return the milliseconds of a step of a case on the H200."""
    return float(_there(program(name, way))["median_ms"])


def launch_us() -> float:
    """Return the microseconds that one small operator costs in a loop of 400."""
    return 1e3 * took("case_2", "a") / 400


def bend_bytes() -> float:
    """Return the size at which moving the bytes of x + 1 takes as long as launching it."""
    return launch_us() / 1e6 * float(ceilings()["dram_bytes_per_second"])


def trace_of(name: str, way: str) -> Path | None:
    """Return the torch.profiler trace of one way of a case."""
    return _kept(f"traces/{name}-{way}/trace.json.gz")


@cache
def trace_summary(name: str, way: str) -> dict[str, Any]:
    """Return what dpscope reads from the trace of a case: busy, idle, waits."""
    from dpscope.instruments.trace import read_trace, summarise

    return summarise([read_trace(_there(trace_of(name, way)))])


def table(name: str) -> str:
    """Return a table that torch.profiler printed on the H200, as it was printed."""
    path = _kept(f"tables/{name}.txt")
    return path.read_text(encoding="utf-8") if path else NOT_RECORDED


def totals(name: str) -> dict[str, float]:
    """Return torch.profiler's totals of the network of lesson 2 on the H200."""
    return dict(_there(_json(f"tables/{name}-totals.json")))


def live_bytes(way: str) -> list[int]:
    """Return the memory that is live after each step of case 10 on the H200."""
    return list(_there(_json("case_10-live.json"))[way])


def rank(parallel: str, number: int = 0) -> dict[str, Any] | None:
    """Return what one rank of two measured, on gloo, both ranks on the one H200."""
    return _json(f"ranks/{parallel}-rank{number}.json")


def rank_trace(parallel: str, number: int = 0) -> Path | None:
    return _kept(f"ranks/{parallel}-rank{number}.trace.json.gz")


def card_over_time() -> list[dict[str, str]]:
    """Return what nvidia-smi said about the H200 every quarter of a second: idle, multiplying, copying."""
    path = _kept("nvidia-smi.csv")
    if path is None:
        return []
    with path.open(encoding="utf-8") as file:
        return [{name.strip(): value.strip() for name, value in line.items()} for line in csv.DictReader(file)]


def hottest(column: str) -> float:
    """Return the highest value of a column of nvidia-smi's log, by the beginning of its name."""
    return max(float(line[name]) for line in card_over_time() for name in line if name.startswith(column))


def coolest(column: str) -> float:
    """Return the first value of a column of nvidia-smi's log: the idle card."""
    line = card_over_time()[0]
    return next(float(value) for name, value in line.items() if name.startswith(column))


def details(report: str) -> KernelDetails | None:
    """Return the first launch on the Details page of a report of ncu."""
    return next(iter(launches(report)), None)


@cache
def launches(report: str) -> list[KernelDetails]:
    """Return every launch on the Details page of a report of ncu."""
    path = _kept(f"{report}.details.csv")
    return read_details(path) if path else []


@cache
def estimated_speedups(report: str) -> list[float]:
    """Return, for each launch of a report, the largest speed-up that ncu's rules estimate, in percent."""
    path = _kept(f"{report}.details.csv")
    found: dict[str, float] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for line in csv.DictReader(lines[first:]):
        estimate = line.get("Estimated Speedup") or "0"
        found[line["ID"]] = max(found.get(line["ID"], 0.0), float(estimate.replace(",", "")))
    return list(found.values())


def counters(report: str) -> Action | None:
    """Return every counter of a report of ncu, in base units."""
    path = _kept(f"{report}.raw.csv")
    return parse_raw_csv(path.read_text(encoding="utf-8"))[0] if path else None


def metric(report: str, name: str) -> float:
    """Return one number of the Details page."""
    return float(_there(details(report)).number(name))


def duration_us(launch: KernelDetails) -> float:
    """Return the duration of a launch in microseconds, whichever unit ncu chose."""
    found = next(each for each in launch.metrics if each.name == "Duration")
    return found.number * {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}[found.unit]


def strided_times() -> float:
    """Return how many times as long the kernel with scattered reads of strided.cu takes."""
    neighbours, strided = (duration_us(launch) for launch in launches("strided"))
    return strided / neighbours


def source_table() -> str:
    """Return, as text, the lines of strided.cu that ncu's Source page says something about."""
    path = _kept("strided.source.csv")
    return path.read_text(encoding="utf-8")[:1500] if path else NOT_RECORDED


STALLED = "smsp__average_warps_issue_stalled_"


def stalls(report: str) -> dict[str, float]:
    """Return the cycles between two instructions of a warp by what it waited for, most first."""
    seen = _there(counters(report)).metrics
    names = [name for name in seen if name.startswith(STALLED) and name.endswith("_per_issue_active.ratio")]
    found = {name.removeprefix(STALLED).removesuffix("_per_issue_active.ratio"): seen[name] for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def stall_percent(report: str, *reasons: str) -> float:
    """Return the share of a warp's cycles that it spends in these states, in percent."""
    found = stalls(report)
    return 100 * sum(found.get(reason, 0.0) for reason in reasons) / sum(found.values())


PIPES = {
    "ALU": "sm__pipe_alu_cycles_active",
    "FMA": "sm__pipe_fma_cycles_active",
    "FP64": "sm__pipe_fp64_cycles_active",
    "Tensor": "sm__pipe_tensor_cycles_active",
    "TMA": "sm__pipe_tma_cycles_active",
    "LSU": "sm__inst_executed_pipe_lsu",
    "ADU": "sm__inst_executed_pipe_adu",
    "CBU": "sm__inst_executed_pipe_cbu",
    "TEX": "sm__inst_executed_pipe_tex",
    "Uniform": "sm__inst_executed_pipe_uniform",
    "XU": "sm__inst_executed_pipe_xu",
}


def pipes(report: str) -> dict[str, float]:
    """Return how busy each pipe of the SM was, in percent of its active cycles."""
    seen = _there(counters(report)).metrics
    return {name: seen.get(f"{metric}.avg.pct_of_peak_sustained_active", 0.0) for name, metric in PIPES.items()}


def l2_bytes() -> float:
    """Return the size of the L2 cache that ncu reads from the card."""
    names, _, values = list(csv.reader(_there(_kept("addition.raw.csv")).read_text(encoding="utf-8").splitlines()))[-3:]
    return float(dict(zip(names, values, strict=True))["device__attribute_l2_cache_size"].replace(",", ""))


# Tensor-core operations by the algorithm: a product of 4096³; both Gram products on and below the diagonal, in tiles of
# 128, for 8 samples of 1024 positions and 2048 features.
TENSOR_FLOPS = {"tensor_cores": 2 * 4096**3, "gram": 2 * 2 * 2048 * 8 * (36 * 128**2)}


def kernel_on_roofline(report: str) -> dict[str, float] | None:
    """Return operations, bytes of DRAM and seconds of a profiled kernel."""
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


def of_roof(report: str) -> float:
    """Return a kernel's rate as a share of its roof: bandwidth below the ridge, the limit of its unit above."""
    point, roofs = _there(kernel_on_roofline(report)), ceilings()
    unit = roofs["tensor_flops_per_second" if report in TENSOR_FLOPS else "fp32_flops_per_second"]
    roof = min(point["flops"] / point["bytes"] * roofs["dram_bytes_per_second"], unit)
    return float(point["flops"] / point["seconds"] / roof)


def ridge(unit: str = "tensor") -> float:
    """Return the operations for each byte at which memory and a unit (`tensor`, `fp32`) are balanced."""
    return float(ceilings()[f"{unit}_flops_per_second"] / ceilings()["dram_bytes_per_second"])


def timeline(report: str) -> CapturedTimeline | None:
    """Return a capture of nsys, stripped of what it says about the machine."""
    path = _kept(f"{report}.sqlite")
    return read_timeline(path) if path else None


def busy_percent(report: str) -> float:
    """Return how much of a capture the GPU was busy."""
    return levels(_there(timeline(report)))["GPU busy, % of the capture"]


def copies_gb_per_second(report: str) -> float:
    """Return how fast a capture's copies to the device were while they ran."""
    table = link(_there(timeline(report))).set_index("direction")
    return float(table.loc["Host-to-Device", "gb_per_second"])

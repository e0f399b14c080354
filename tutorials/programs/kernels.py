"""Kernels that ncu profiled on an NVIDIA H200: sections, stalls, pipes, and where they lie under the roofs."""

from __future__ import annotations

import csv
from functools import cache

from recordings import NOT_RECORDED, kept
from sweeps import ceilings, there

from dpscope.instruments.ncu.details import KernelDetails, read_details
from dpscope.instruments.ncu.reading import Action, parse_raw_csv


def details(report: str) -> KernelDetails | None:
    """Return the first launch on the Details page of a report of ncu."""
    return next(iter(launches(report)), None)


@cache
def launches(report: str) -> list[KernelDetails]:
    """Return every launch on the Details page of a report of ncu."""
    path = kept(f"{report}.details.csv")
    return read_details(path) if path else []


@cache
def estimated_speedups(report: str) -> list[float]:
    """Return, for each launch of a report, the largest speed-up that ncu's rules estimate, in percent."""
    path = kept(f"{report}.details.csv")
    found: dict[str, float] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for line in csv.DictReader(lines[first:]):
        estimate = line.get("Estimated Speedup") or "0"
        found[line["ID"]] = max(found.get(line["ID"], 0.0), float(estimate.replace(",", "")))
    return list(found.values())


def counters(report: str) -> Action | None:
    """Return every counter of a report of ncu, in base units."""
    path = kept(f"{report}.raw.csv")
    return parse_raw_csv(path.read_text(encoding="utf-8"))[0] if path else None


def counter(report: str, name: str) -> float:
    """Return one counter of a report, in base units."""
    return float(there(counters(report)).metrics[name])


def metric(report: str, name: str) -> float:
    """Return one number of the Details page."""
    return float(there(details(report)).number(name))


def duration_us(launch: KernelDetails) -> float:
    """Return the duration of a launch in microseconds, whichever unit ncu chose."""
    found = next(each for each in launch.metrics if each.name == "Duration")
    return found.number * {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}[found.unit]


def strided_times() -> float:
    """Return how many times as long the kernel with scattered reads of strided.cu takes."""
    neighbours, strided = (duration_us(launch) for launch in launches("strided"))
    return strided / neighbours


@cache
def accesses() -> list[dict[str, str]]:
    """Return the loads and stores of both kernels of strided.cu, from ncu's Source page: one row an instruction."""
    path = kept("strided.sass.csv")
    found: dict[tuple[str, str], dict[str, str]] = {}
    kernel, names = "", []
    for cells in csv.reader(path.read_text(encoding="utf-8").splitlines() if path else []):
        if cells[0] == "Kernel Name":
            kernel = cells[1].partition("(")[0]
        elif cells[0] == "Address":
            names = cells
        elif (row := dict(zip(names, cells, strict=True))).get("Address Space") == "Global":
            found[kernel, row["Source"]] = row | {"kernel": kernel}
    return list(found.values())


def sectors_a_request(kernel: str, operation: str = "Load") -> float:
    """Return how many sectors each request of a warp touches in a kernel of strided.cu."""
    row = next(row for row in accesses() if (row["kernel"], row["Access Operation"]) == (kernel, operation))
    return float(row["L2 Theoretical Sectors Global"]) / float(row["Instructions Executed"])


def source_table() -> str:
    """Return ncu's Source page of strided.cu as text: the instructions that touch global memory."""
    lines = [f"{'kernel':12}{'instruction':32}{'requests':>12}{'sectors':>13}{'ideal':>12}{'excess':>12}"]
    for row in accesses():
        counts = [int(float(row[f"L2 Theoretical Sectors Global{kind}"] or 0)) for kind in ("", " Ideal", " Excessive")]
        requests = int(row["Instructions Executed"])
        numbers = f"{requests:>12,}{counts[0]:>13,}{counts[1]:>12,}{counts[2]:>12,}"
        lines.append(f"{row['kernel']:12}{row['Source'].strip():32}{numbers}")
    return "\n".join(lines) if accesses() else NOT_RECORDED


STALLED = "smsp__average_warps_issue_stalled_"


def stalls(report: str) -> dict[str, float]:
    """Return the cycles between two instructions of a warp by what it waited for, most first."""
    seen = there(counters(report)).metrics
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
    seen = there(counters(report)).metrics
    return {name: seen.get(f"{metric}.avg.pct_of_peak_sustained_active", 0.0) for name, metric in PIPES.items()}


def l2_bytes() -> float:
    """Return the size of the L2 cache that ncu reads from the card."""
    names, _, values = list(csv.reader(there(kept("addition.raw.csv")).read_text(encoding="utf-8").splitlines()))[-3:]
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
    point, roofs = there(kernel_on_roofline(report)), ceilings()
    unit = roofs["tensor_flops_per_second" if report in TENSOR_FLOPS else "fp32_flops_per_second"]
    roof = min(point["flops"] / point["bytes"] * roofs["dram_bytes_per_second"], unit)
    return float(point["flops"] / point["seconds"] / roof)


def ridge(unit: str = "tensor") -> float:
    """Return the operations for each byte at which memory and a unit (`tensor`, `fp32`) are balanced."""
    return float(ceilings()[f"{unit}_flops_per_second"] / ceilings()["dram_bytes_per_second"])

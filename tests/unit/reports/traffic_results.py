"""Results with traffic in them. Standard's figures are a real capture; private methods' are made from it by factors."""

from __future__ import annotations

import json
from typing import Any

from dpscope.results.schema import Result, result_for
from tests import DATA

CAPTURE = json.loads((DATA / "ncu_small_step.json").read_text(encoding="utf-8"))

SPEC = {
    "workload": {"kind": "transformer", "name": "small", "hidden_dim": 512, "num_layers": 4},
    "batch_size": 4,
    "seq_len": 256,
    "dtype": "bf16",
    "optimizer": "adamw",
    "noise_multiplier": 1.0,
    "max_grad_norm": 1.0,
    "warmup": 3,
    "steps": 10,
    "options": {},
}
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "gpu_memory_bytes": 150 * 10**9,
    "cuda": "13.0",
    "torch": "2.11.0",
    "opacus": "1.6.0",
    "dpscope": "0.1.0",
}
CEILINGS = {
    "dram_bytes_per_second": 4.0e12,
    "tensor_flops_per_second": 6.24e14,
    "fp32_flops_per_second": 5.0e13,
    "how": "best of 10: a copy of 2 GiB, and 8192×8192 matrix products",
}
REASON = "ncu may not read this GPU's counters (ERR_NVGPUCTRPERM): ask the administrator."

# What each method multiplies the families of the captured step by.
FACTORS: dict[str, dict[str, float]] = {
    "standard": {},
    "flat": {"elementwise": 3.0, "copy": 6.0},
    "ghost": {"gemm": 2.4, "elementwise": 2.0, "copy": 2.0},
    "flash": {"gemm": 1.1},
}
TIMES_MS = {"standard": 19.0, "flat": 42.0, "ghost": 51.0, "flash": 20.0}


def kernel_rows(method: str) -> list[dict[str, Any]]:
    factors = FACTORS[method]
    scaled = ("dram_read_bytes", "dram_write_bytes")
    rows = [
        {**row, **{key: round(row[key] * factors.get(row["family"], 1.0)) for key in scaled}}
        for row in CAPTURE["kernels"]["rows"]
    ]
    if method in ("flat", "flash"):
        own = {
            "name": "clip_kernel",
            "family": "clipping",
            "phase": "clip",
            "calls": 9,
            "flops": 10**9,
            "time_ns": 10**5,
        }
        rows.append({**own, "dram_read_bytes": 2 * 10**8, "dram_write_bytes": 10**8, "l2_to_sm_bytes": 10**8})
    return rows


def traffic_of(method: str) -> dict[str, Any]:
    rows = kernel_rows(method)
    base = sum(row["dram_read_bytes"] + row["dram_write_bytes"] for row in kernel_rows("standard"))
    factor = sum(row["dram_read_bytes"] + row["dram_write_bytes"] for row in rows) / base
    return {name: round(count * factor) for name, count in CAPTURE["traffic"].items()}


def ncu_part(method: str, *, measured: bool = True, per_kernel: bool = False) -> dict[str, Any]:
    traffic = traffic_of(method)
    factors = {"dram_read_bytes": 0.8, "dram_write_bytes": 1.1}
    guess = {name: round(factor * traffic[name]) for name, factor in factors.items()}
    kernels = {"rows": kernel_rows(method), "calls_seen": 298, "calls_total": 298, "note": ""}
    part = {
        "source": "measured",
        "reason": None,
        "ncu_version": "2025.3.1",
        "traffic": traffic,
        "flops": dict(CAPTURE["flops"]),
        "missing": {"l2_tex_read_bytes": "the report does not hold it"},
        "estimate": guess,
        "kernels": kernels if per_kernel else {},
        "ceilings": CEILINGS,
    }
    if measured:
        return part
    spots = {"blind_spots": ["Caches are not seen."]}
    missing = dict.fromkeys(("l2_read_bytes", "l2_write_bytes"), "an estimate knows no caches")
    return part | {
        "source": "estimate",
        "reason": REASON,
        "traffic": guess,
        "estimate": guess | spots,
        "kernels": kernels,
        "missing": missing,
    }


def results_for(
    *methods: str, measured: bool = True, per_kernel: bool = False, timed: bool = True, **spec: Any
) -> list[Result]:
    """An unprofiled time and an `ncu` result for each method."""
    results = []
    for method in methods or tuple(FACTORS):
        described = {**SPEC, **spec, "method": method}
        median = TIMES_MS[method]
        timing = {"step_ms": [median] * 10, "median_ms": median, "p10_ms": median, "p90_ms": median, "mean_ms": median}
        if timed:
            results.append(result_for({**described, "instrument": "time"}, timing=timing, environment=ENVIRONMENT))
        part = ncu_part(method, measured=measured, per_kernel=per_kernel)
        results.append(result_for({**described, "instrument": "ncu"}, ncu=part, environment=ENVIRONMENT))
    return results

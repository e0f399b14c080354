"""Results of the trace instrument, as small as they can be."""

from __future__ import annotations

from typing import Any


def operator(name: str, phase: str, ms: float, *, gpu: bool = False) -> dict[str, Any]:
    return {
        "operator": name,
        "phase": phase,
        "count": 1.0,
        "self_cpu_ms": 0.1 if gpu else ms,
        "gpu_ms": ms if gpu else 0.0,
    }


def make_trace(operators: list[dict[str, Any]], outside: float = 1.0, *, idle: float | None = None) -> dict[str, Any]:
    """With `idle`, of a GPU: `outside` is then what overlaps."""
    gpu = idle is not None
    work = sum(row["gpu_ms" if gpu else "self_cpu_ms"] for row in operators)
    step = work - outside + (idle or 0.0) if gpu else work + outside
    phases: dict[str, float] = {}
    for row in operators:
        phases[row["phase"]] = phases.get(row["phase"], 0.0) + (row["gpu_ms"] if gpu else row["self_cpu_ms"])
    trace: dict[str, Any] = {
        "basis": "gpu" if gpu else "cpu",
        "steps": 2,
        "step_ms": step,
        "each_step_ms": [step, step],
        "phases": [{"phase": name, "cpu_ms": ms, "gpu_ms": ms if gpu else 0.0} for name, ms in phases.items()],
        "operators": operators,
        "outside_operators_ms": outside,
        "named": [],
        "synchronisations": [],
        "casts": [],
        "files": {"trace.json.gz": 2**20},
    }
    if gpu:
        idle_parts = {"idle_waiting_for_host_ms": idle, "idle_between_queued_ms": 0.0, "idle_at_end_ms": 0.0}
        trace["gpu"] = {"busy_ms": work - outside, "idle_ms": idle, "overlap_ms": outside, "kernels": 9.0}
        trace["gpu"] |= {"mean_kernel_us": 100.0, **idle_parts}
        trace |= {"copies": [], "kernels": [], "families": [{"family": "gemm", "count": 3.0, "ms": work}]}
    return trace


STANDARD = [operator("aten::mm", "backward", 5.0), operator("aten::add", "forward", 2.0)]
FLAT = [
    operator("aten::mm", "backward", 4.0),
    operator("aten::bmm", "backward", 9.0),
    operator("aten::add", "noise", 3.0),
]
GPU = [operator("aten::mm", "backward", 6.0, gpu=True)]

"""Results as the memory instrument gives them, small enough to be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

MIB = 2**20

# Component -> MiB at the peak, for a model of 100 MiB.
PEAKS = {
    "standard": {"model_parameters": 100, "optimizer_states": 200, "gradients": 100, "activations": 300, "inputs": 1},
    "flat": {
        "model_parameters": 100,
        "optimizer_states": 200,
        "gradients": 100,
        "activations": 40,
        "activation_hooks": 60,
        "per_sample_gradients": 800,
        "inputs": 1,
    },
    "ghost": {
        "model_parameters": 100,
        "optimizer_states": 200,
        "gradients": 50,
        "activations": 300,
        "activation_hooks": 150,
        "norm_samples": 0.001,
        "temp_matrices": 128,
        "inputs": 1,
    },
    "flash": {"model_parameters": 100, "optimizer_states": 200, "gradients": 60, "activations": 290, "inputs": 1},
}
KEYS = (
    "model_parameters",
    "optimizer_states",
    "gradients",
    "activations",
    "activation_hooks",
    "per_sample_gradients",
    "norm_samples",
    "temp_matrices",
    "inputs",
    "unattributed",
)


def memory_result(make_result: Any, method: str = "standard", *, peak: dict[str, float] | None = None, **spec: Any):
    """A result of the memory instrument; `peak`: component -> MiB."""
    chosen = peak if peak is not None else PEAKS.get(method, PEAKS["ghost"])
    components = {key: round(chosen.get(key, 0) * MIB) for key in (*KEYS, *(k for k in chosen if k not in KEYS))}
    components["unattributed"] += 8 * MIB if peak is None else 0
    total = sum(components.values())
    result = make_result(method=method, peak=total, **spec)
    tracked = {key: count for key, count in components.items() if key != "unattributed"}
    return replace(
        result,
        spec={**result.spec, "instrument": "memory"},
        avg_time_ms=None,
        timing={},
        memory={
            "source": "tracker",
            "peak_bytes": total,
            "tracked_peak_bytes": total - components["unattributed"],
            "peak": {
                "phase": "backward",
                "operator": "aten::bmm",
                "module": "blocks.3.up",
                "components": components,
            },
            "modules": [{"module": f"blocks.{n}.up", "components": {"activations": (5 - n) * MIB}} for n in range(5)],
            "unattributed": [{"what": "cuBLAS workspaces", "bytes": 8 * MIB}],
        },
        breakdown={f"{key}_mb": count / MIB for key, count in components.items()}
        | {"total_allocated_mb": total / MIB, "peak_allocated_mb": total / MIB},
        snapshots=[
            {"name": name, "allocated_mb": mb, "reserved_mb": mb, "timestamp": 1.7e9}
            for name, mb in (("0_model_loaded", 100), ("3_after_warmup", 300), ("iter0_after_forward", 600))
        ],
        timeline=make_timeline(tracked),
    )


def make_timeline(peak: dict[str, int], points: int = 200) -> dict[str, Any]:
    """Up through the forward pass, at the peak in the backward pass, down to what stays."""
    stays = ("model_parameters", "optimizer_states", "inputs")
    top = round(0.55 * points)
    rows = []
    for event in range(points):
        grown = event / top if event <= top else max(0.0, 1 - 1.2 * (event - top) / (points - top))
        rows.append([event, *(count if key in stays else round(count * grown) for key, count in peak.items())])
    ends = [round(share * points) for share in (0, 0.4, 0.8, 0.82, 0.86, 1)]
    names = ("forward", "backward", "clip", "noise", "optimizer")
    phases = [{"name": n, "start": a, "end": b} for n, a, b in zip(names, ends, ends[1:], strict=False)]
    return {"unit": "bytes", "components": list(peak), "points": rows, "phases": phases, "peak": top}

"""Results as the memory instrument gives them, small enough to be added up by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

MIB = 2**20

# Component -> MiB at the peak, of a model of 100 MiB.
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


@pytest.fixture(scope="session")
def make_memory_result(make_result: Callable[..., Any]) -> Callable[..., Any]:
    """A result of the memory instrument; `peak`: component -> MiB, `unattributed`: MiB beside them."""
    from dpscope.vocabulary.components import COMPONENTS

    def make(method: str = "standard", *, peak: dict[str, float] | None = None, unattributed: float = 8, **spec: Any):
        chosen = {**{component.key: 0 for component in COMPONENTS}, **(PEAKS[method] if peak is None else peak)}
        components = {key: round(mib * MIB) for key, mib in {**chosen, "unattributed": unattributed}.items()}
        total = sum(components.values())
        tracked = {key: count for key, count in components.items() if key != "unattributed"}
        memory = {
            "source": "tracker",
            "peak_bytes": total,
            "tracked_peak_bytes": sum(tracked.values()),
            "peak": {
                "phase": "backward",
                "operator": "aten::bmm",
                "module": "blocks.3.up",
                "components": components,
            },
            "modules": [{"module": f"blocks.{n}.up", "components": {"activations": (n + 1) * MIB}} for n in range(5)],
            "tensors": make_tensors(tracked),
            "unattributed": [{"what": "cuBLAS workspaces", "bytes": round(unattributed * MIB)}],
        }
        totals = {"total_allocated_mb": total / MIB, "peak_allocated_mb": total / MIB}
        stages = {"0_model_loaded": 100, "3_after_warmup": 300, "iter0_after_forward": 600}
        result = make_result(method=method, peak=total, **spec)
        return replace(
            result,
            spec={**result.spec, "instrument": "memory"},
            avg_time_ms=None,
            timing={},
            memory=memory,
            breakdown={**{f"{key}_mb": count / MIB for key, count in components.items()}, **totals},
            snapshots=[
                {"name": name, "allocated_mb": mb, "reserved_mb": mb, "timestamp": 1.0} for name, mb in stages.items()
            ],
            timeline=make_timeline(tracked),
        )

    return make


def make_tensors(tracked: dict[str, int]) -> dict[str, Any]:
    """A tensor of each component that has bytes, two halves of the activations, and nothing left."""
    largest = [
        {
            "bytes": count // (2 if component == "activations" else 1),
            "count": 2 if component == "activations" else 1,
            "shape": [8, count // 8],
            "dtype": "float32",
            "component": component,
            "module": "blocks.*.up",
            "phase": "forward",
            "operator": "aten::addmm",
            "line": "model.py:12 forward",
            "by_autograd": component == "gradients",
        }
        for component, count in tracked.items()
        if count
    ]
    largest.sort(key=lambda each: -each["bytes"])
    return {"largest": largest, "rest": {"bytes": 0, "count": 0}}


def make_timeline(peak: dict[str, int], points: int = 60) -> dict[str, Any]:
    """Up through the forward pass, at the peak in the backward pass, down to what stays."""
    stays = ("model_parameters", "optimizer_states", "inputs")
    top = round(0.55 * points)
    rows = []
    for event in range(points):
        grown = event / top if event <= top else max(0.0, 1 - 1.2 * (event - top) / (points - top))
        rows.append([event, *(count if key in stays else round(count * grown) for key, count in peak.items())])
    edges = [round(share * points) for share in (0, 0.4, 0.8, 0.82, 0.86, 1)]
    names = ("forward", "backward", "clip", "noise", "optimizer")
    phases = [{"name": name, "start": a, "end": b} for name, (a, b) in zip(names, pairwise(edges), strict=True)]
    return {"unit": "bytes", "components": list(peak), "points": rows, "phases": phases, "peak": top}


@pytest.fixture(scope="session")
def measured_both_ways(make_result: Callable[..., Any], make_memory_result: Callable[..., Any]) -> Callable[..., Any]:
    """Four methods at one size, each seen by the time instrument and by the memory instrument."""
    times = {"standard": 127.0, "flat": 256.0, "ghost": 347.0, "flash": 139.0}

    def make(**spec: Any) -> list[Any]:
        results = []
        for method, median in times.items():
            tracked = make_memory_result(method, **spec)
            timed = make_result(method=method, median=median, peak=tracked.memory["peak_bytes"], **spec)
            spread = {"p10_ms": 0.97 * median, "p90_ms": 1.05 * median}
            results += [replace(timed, timing={**timed.timing, **spread}), tracked]
        return results

    return make

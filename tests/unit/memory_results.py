"""What a measurement of memory holds, made up: components that add up, tensors, a timeline."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

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

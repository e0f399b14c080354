"""Which points stand below which roofs: how fast work computes against how much it computes for each DRAM byte.

Whole steps combine bytes and operations with the unprofiled time; kernels carry their own times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import MEASURED, Traffic, by_size, compare_traffic, moved

TOP_KERNELS = 6  # of each method
BANDWIDTH = "dram_bytes_per_second"
LEVEL_ROOFS = {"tensor_flops_per_second": "tensor cores", "fp32_flops_per_second": "FP32"}


@dataclass(frozen=True)
class Point:
    """FLOP a byte, FLOP a second."""

    x: float
    y: float
    name: str  # a method's, or a kernel's in full
    method: str
    hollow: bool = False  # the operations are an estimate, and with them the bytes or not
    kernel: bool = False
    estimated: bool = False  # the bytes are


def placed(rows: Sequence[Row]) -> list[list[Traffic]]:
    """Rows that have bytes, operations and a time, size by size."""
    groups = ([t for t in group if t.intensity and t.flop_rate] for group in by_size(compare_traffic(rows)))
    return [group for group in groups if group]


def step_point(traffic: Traffic) -> Point:
    method = traffic.row.method
    return Point(
        traffic.intensity or 0,
        traffic.flop_rate or 0,
        method,
        method,
        hollow=traffic.flops_estimated,
        estimated=traffic.estimated,
    )


def kernel_points(group: Sequence[Traffic]) -> list[Point]:
    """The measured kernels that move most, of those that have operations to count; most bytes first."""
    found = []
    for traffic in group:
        if traffic.kernels is None or traffic.kernels.source != MEASURED:
            continue
        counted = [row for row in traffic.kernels.rows if row.get("flops") and row.get("time_ns") and moved(row)]
        for row in sorted(counted, key=moved, reverse=True)[:TOP_KERNELS]:
            x, y = row["flops"] / moved(row), row["flops"] / (row["time_ns"] / 1e9)
            found.append((moved(row), Point(x, y, str(row["name"]), traffic.row.method, kernel=True)))
    return [point for _, point in sorted(found, key=lambda pair: -pair[0])]


def level_roofs(traffic: Traffic) -> dict[str, float]:
    """FLOP a second that matrix products reach on this machine, by what computes them."""
    return {label: traffic.ceilings[name] for name, label in LEVEL_ROOFS.items() if traffic.ceilings.get(name)}


def point_notes(traffics: Sequence[Traffic], points: Sequence[Point]) -> str:
    """What the markers mean."""
    notes = ["Whole steps, over their unprofiled time"]
    if any(point.kernel for point in points):
        notes.append("small: the kernels that move most, over their own time")
    if any(point.hollow for point in points):
        bytes_too = any(traffic.estimated for traffic in traffics)
        notes.append(f"hollow: {'bytes and operations' if bytes_too else 'operations'} are an estimate")
    if not any(traffic.ceilings for traffic in traffics):
        notes.append("no roofs were measured here")
    return "; ".join(notes)

"""Which points stand below which roofs: how fast work computes against how much it computes for each DRAM byte.

Whole steps combine bytes and operations with the unprofiled time; kernels carry their own times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import Traffic, by_size, moved

DRAWN_KERNELS = 6  # of each method


@dataclass(frozen=True)
class RooflinePoint:
    """FLOP a byte, FLOP a second."""

    x: float
    y: float
    name: str  # a method's, or a kernel's in full
    method: str
    hollow: bool = False  # the operations are an estimate, and with them the bytes or not
    estimated: bool = False  # the bytes are
    kernel: bool = False


@dataclass(frozen=True)
class Roofs:
    """What the machine reaches, as far as it was measured."""

    bandwidth: float | None  # DRAM bytes a second
    levels: dict[str, float]  # what computes -> FLOP a second of matrix products

    @classmethod
    def over(cls, traffic: Traffic) -> Roofs:
        found = traffic.ceilings
        levels = {"tensor cores": found.get("tensor_flops_per_second"), "FP32": found.get("fp32_flops_per_second")}
        return cls(found.get("dram_bytes_per_second"), {label: rate for label, rate in levels.items() if rate})


@dataclass(frozen=True)
class Roofline:
    """Rows of one size that have bytes, operations and a time."""

    traffics: list[Traffic]
    points: list[RooflinePoint]  # whole steps, then kernels by their bytes
    roofs: Roofs


def rooflines(rows: Sequence[Row]) -> list[Roofline]:
    """One for each size."""
    found = []
    for group in by_size(rows, lambda traffic: traffic.intensity and traffic.flop_rate):
        steps = [
            RooflinePoint(t.intensity or 0, t.flop_rate or 0, t.method, t.method, t.flops_estimated, t.estimated)
            for t in group
        ]
        found.append(Roofline(group, [*steps, *_kernel_points(group)], Roofs.over(group[0])))
    return found


def _kernel_points(group: Sequence[Traffic]) -> list[RooflinePoint]:
    """The measured kernels that move most, of those that have operations to count."""
    found = []
    for traffic in group:
        kernels = [] if traffic.kernels is None or traffic.kernels.estimated else traffic.kernels.rows
        counted = [
            (count, flops, time, kernel["name"])
            for kernel in kernels
            if (count := moved(kernel)) and (flops := kernel.get("flops")) and (time := kernel.get("time_ns"))
        ]
        for count, flops, time, name in sorted(counted, key=lambda each: -each[0])[:DRAWN_KERNELS]:
            found.append((count, RooflinePoint(flops / count, flops / (time / 1e9), name, traffic.method, kernel=True)))
    return [point for _, point in sorted(found, key=lambda pair: -pair[0])]


def point_notes(rooflines: Sequence[Roofline]) -> str:
    """What the markers mean."""
    traffics = [traffic for each in rooflines for traffic in each.traffics]
    points = [point for each in rooflines for point in each.points]
    notes = ["Whole steps, over their unprofiled time"]
    if any(point.kernel for point in points):
        notes.append("small: the kernels that move most, over their own time")
    if any(point.hollow for point in points):
        bytes_too = any(traffic.estimated for traffic in traffics)
        notes.append(f"hollow: {'bytes and operations' if bytes_too else 'operations'} are an estimate")
    if not any(traffic.ceilings for traffic in traffics):
        notes.append("no roofs were measured here")
    return "; ".join(notes)

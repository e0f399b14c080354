"""Traffic of a step, and what follows from it: pure functions of rows.

Bytes come from the instrument `ncu`: counted by the GPU, or estimated from tensor sizes. Times come from the unprofiled
run of the same spec (the instrument `time`), since a profiler stretches a step. The two kinds of bytes are never
compared with each other, except to say how far the estimate is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dpscope.reports.tables import Row, group_by_size, once_a_row
from dpscope.results.payloads import ncu
from dpscope.results.payloads.ncu import ESTIMATE, MEASURED, READ, WRITE, KernelRows, kernels_in
from dpscope.units import MISSING
from dpscope.vocabulary.phases import FAMILIES

APPROXIMATELY = "≈"  # before every estimated number
SMALLEST = 0.01  # of a method's bytes or time: what is below is not worth a word
UNSEEN = "not seen kernel by kernel"


def marked_estimate(text: str, estimated: bool) -> str:
    """Return a figure as it is shown: an estimate is marked as one."""
    return APPROXIMATELY + text if estimated and text != MISSING else text


@dataclass(frozen=True)
class ExtraBytes:
    """DRAM bytes beyond ordinary training's, family by family, most first; below zero where a method moves less."""

    kernels: KernelRows
    by_family: list[tuple[str, float]]

    @property
    def total(self) -> float:
        return sum(count for _, count in self.by_family)


@dataclass(frozen=True, eq=False, kw_only=True)
class Traffic:
    """One row's bytes, and what follows from them. Unknown values are None."""

    row: Row
    method: str
    data: ncu.NcuPayload
    source: str
    estimated: bool
    estimate: ncu.Estimate  # beside a measurement too
    ceilings: ncu.Ceilings  # what this machine reaches
    items: tuple[int, str]  # how many of what the step worked on
    seconds: float | None  # median of an unprofiled step
    dram_bytes: float | None  # read and written
    bytes_per_item: float | None
    bandwidth: float | None  # DRAM bytes a second over an unprofiled step
    bandwidth_fraction: float | None  # of what a large copy reaches on this machine
    flops: float | None  # as far as they were counted; torch's formulas where no counter saw any (FP32 in a range)
    flops_estimated: bool
    flop_rate: float | None
    intensity: float | None  # floating-point operations for each DRAM byte

    def figure(self, name: str) -> float | None:
        """Return a count of bytes by its name in the result file."""
        return self.data["traffic"].get(name)

    def show(self, text: str) -> str:
        """Return a figure of these bytes as it is shown."""
        return marked_estimate(text, self.estimated)

    @cached_property
    def standard(self) -> Traffic | None:
        """Traffic of ordinary training, of the same size and source."""
        other = traffic_of(self.row.standard) if self.row.standard else None
        return other if other and other.source == self.source else None

    @property
    def ratio(self) -> float | None:
        """DRAM bytes, as a multiple of ordinary training's."""
        return _divide(self.dram_bytes, self.standard.dram_bytes) if self.standard else None

    @property
    def extra_seconds(self) -> float | None:
        """How much longer a step takes than ordinary training's."""
        return _subtract(self.seconds, self.standard.seconds) if self.standard else None

    @property
    def extra_seconds_at_peak(self) -> float | None:
        """Time to move the extra bytes at this machine's measured bandwidth: no schedule can be faster."""
        extra = _subtract(self.dram_bytes, self.standard.dram_bytes) if self.standard else None
        return _divide(extra, self.ceilings.get("dram_bytes_per_second"))

    def estimate_error(self, name: ncu.Direction) -> float | None:
        """Return (estimate - measurement) / measurement, if both exist."""
        return None if self.estimated else _subtract(_divide(self.estimate.get(name), self.figure(name)), 1)

    @cached_property
    def kernels(self) -> KernelRows | None:
        """Measured kernel rows if there are any, or else the estimate's."""
        return kernels_in(self.data, MEASURED) or kernels_in(self.data, ESTIMATE)

    @property
    def by_family(self) -> bool:
        """True if there are kernel rows of the same kind as the bytes of the whole step."""
        return self.kernels is not None and self.kernels.source == self.source

    @cached_property
    def family_bytes(self) -> dict[str, float]:
        """Bytes of the whole step by family; bytes that no kernel accounts for are UNSEEN."""
        parts = self.kernels.bytes_by_family() if self.kernels else {}
        whole = self.dram_bytes or 0.0
        rest = whole - sum(parts.values())
        return parts | ({UNSEEN: rest} if rest > SMALLEST * whole else {})

    @cached_property
    def extra_bytes(self) -> ExtraBytes | None:
        """Kernel families behind the difference to ordinary training; None unless both have kernels of one source."""
        alike = kernels_alike([self, self.standard]) if self.standard else None
        if alike is None:
            return None
        mine, theirs = (kernels.bytes_by_family() for kernels in alike)
        extra = [(family, mine.get(family, 0) - theirs.get(family, 0)) for family in FAMILIES]
        return ExtraBytes(alike[0], sorted((part for part in extra if part[1]), key=lambda part: -part[1]))


def kernels_alike(traffics: Sequence[Traffic]) -> list[KernelRows] | None:
    """Return kernel rows of all, from one source: measured, or else all estimates. None if some have neither."""
    for source in (MEASURED, ESTIMATE):
        found = [rows for traffic in traffics if (rows := kernels_in(traffic.data, source))]
        if len(found) == len(traffics):
            return found
    return None


@once_a_row
def traffic_of(row: Row) -> Traffic | None:
    """Return the traffic of a row; None without an `ncu` result."""
    if not (data := row.first_of(lambda result: result.ncu)):
        return None
    estimate, ceilings = data.get("estimate", {}), data.get("ceilings", {})
    samples, length = row.samples, row.spec.get("seq_len")
    items = (samples * length, "token") if length else (samples, "sample")
    read, written = (data["traffic"].get(name) for name in (READ, WRITE))
    moved = None if read is None or written is None else read + written
    operations = data.get("flops", {})
    counted = float(operations.get("total", sum(operations.values())))
    flops = counted or estimate.get("flops", {}).get("total")
    seconds = _divide(row.median_ms, 1e3)
    bandwidth = _divide(moved, seconds)
    return Traffic(
        row=row,
        method=row.method,
        data=data,
        source=data["source"],
        estimated=data["source"] == ESTIMATE,
        estimate=estimate,
        ceilings=ceilings,
        items=items,
        seconds=seconds,
        dram_bytes=moved,
        bytes_per_item=_divide(moved, items[0]),
        bandwidth=bandwidth,
        bandwidth_fraction=_divide(bandwidth, ceilings.get("dram_bytes_per_second")),
        flops=flops,
        flops_estimated=data["source"] == ESTIMATE or (not counted and flops is not None),
        flop_rate=_divide(flops, seconds),
        intensity=_divide(flops, moved),
    )


TrafficGroups = Sequence[Sequence[Traffic]]  # by size


def by_size(rows: Sequence[Row], is_wanted: Callable[[Traffic], object] = bool) -> list[list[Traffic]]:
    """Return the traffic of rows that are compared with each other, as far as it is wanted; no empty groups."""
    groups = ([t for row in group if (t := traffic_of(row)) and is_wanted(t)] for group in group_by_size(rows))
    return [group for group in groups if group]


def _subtract(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by

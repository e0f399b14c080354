"""What a step moves, and what follows from it: pure functions of rows.

Bytes come from the instrument `ncu`: counted by the GPU, or estimated from tensor sizes. Times come from the unprofiled
run of the same spec (the instrument `time`), since a profiler stretches a step. The two kinds of bytes are never
compared with each other, except to say how far the estimate is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dpscope.reports.tables import Row, group_by_size, once_a_row
from dpscope.results.payloads.ncu import (
    ESTIMATE,
    MEASURED,
    READ,
    WRITE,
    Ceilings,
    Direction,
    Estimate,
    KernelRow,
    NcuPayload,
)
from dpscope.units import MISSING
from dpscope.vocabulary.families import FAMILIES, OTHER

APPROXIMATELY = "≈"  # before every estimated number
SMALLEST = 0.01  # of a method's bytes or time: what is below is not worth a word
UNSEEN = "not seen kernel by kernel"


def marked_estimate(text: str, estimated: bool) -> str:
    """A figure as it is shown: an estimate is marked as one."""
    return APPROXIMATELY + text if estimated and text != MISSING else text


@dataclass(frozen=True)
class KernelRows:
    """Where bytes go, kernel by kernel (or operator by operator, in an estimate)."""

    rows: list[KernelRow]
    source: str
    calls_seen: int
    calls_total: int | None
    note: str

    @property
    def estimated(self) -> bool:
        return self.source == ESTIMATE

    @property
    def complete(self) -> bool:
        return self.calls_total is None or self.calls_seen >= self.calls_total

    def bytes_by_family(self) -> dict[str, float]:
        """DRAM bytes of each family that moved any, in the families' order."""
        totals: dict[str, float] = dict.fromkeys(FAMILIES, 0)
        for row in self.rows:
            totals[row["family"] if row["family"] in totals else OTHER] += moved(row)
        return {family: count for family, count in totals.items() if count}


def moved(row: KernelRow) -> float:
    """DRAM bytes of one kernel row, read and written."""
    return (row.get(READ) or 0) + (row.get(WRITE) or 0)


@dataclass(frozen=True, eq=False)
class Traffic:
    """One row's bytes, and what follows from them. Whatever is not known is None."""

    row: Row
    data: NcuPayload
    estimate: Estimate  # beside a measurement too
    ceilings: Ceilings  # what this machine reaches
    dram_bytes: float | None  # read and written
    flops: float | None  # as far as they were counted; torch's formulas where no counter saw any (FP32 in a range)
    flops_estimated: bool
    seconds: float | None  # median of an unprofiled step
    items: tuple[int, str]  # how many of what the step worked on

    @property
    def method(self) -> str:
        return self.row.method

    @property
    def source(self) -> str:
        return self.data["source"]

    @property
    def estimated(self) -> bool:
        return self.source == ESTIMATE

    def figure(self, name: str) -> float | None:
        """A count of bytes by its name in the result file."""
        return self.data["traffic"].get(name)

    def show(self, text: str) -> str:
        """A figure of these bytes as it is shown."""
        return marked_estimate(text, self.estimated)

    @property
    def bytes_per_item(self) -> float | None:
        return _divide(self.dram_bytes, self.items[0])

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each DRAM byte."""
        return _divide(self.flops, self.dram_bytes)

    @property
    def flop_rate(self) -> float | None:
        return _divide(self.flops, self.seconds)

    @property
    def bandwidth(self) -> float | None:
        """DRAM bytes a second over an unprofiled step."""
        return _divide(self.dram_bytes, self.seconds)

    @property
    def bandwidth_fraction(self) -> float | None:
        """Of what a large copy reaches on this machine."""
        return _divide(self.bandwidth, self.ceilings.get("dram_bytes_per_second"))

    @cached_property
    def standard(self) -> Traffic | None:
        """Ordinary training's, of the same size and the same source."""
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
        """What moving the extra bytes takes at this machine's measured bandwidth: no schedule can be faster."""
        extra = _subtract(self.dram_bytes, self.standard.dram_bytes) if self.standard else None
        return _divide(extra, self.ceilings.get("dram_bytes_per_second"))

    def estimate_error(self, name: Direction) -> float | None:
        """(estimate - measurement) / measurement, where both exist."""
        ratio = None if self.estimated else _divide(self.estimate.get(name), self.figure(name))
        return None if ratio is None else ratio - 1

    @cached_property
    def kernels(self) -> KernelRows | None:
        """Measured kernel rows where there are any, or else the estimate's."""
        return self.kernels_of(MEASURED) or self.kernels_of(ESTIMATE)

    def kernels_of(self, source: str) -> KernelRows | None:
        own, estimated = self.data.get("kernels", {}), self.estimate.get("kernels", {})
        for found, whose in ((own, self.source), (estimated, ESTIMATE)):
            if whose == source and (rows := found.get("rows")):
                calls = found.get("calls_seen", sum(row.get("calls", 1) for row in rows))
                return KernelRows(rows, source, calls, found.get("calls_total"), found.get("note", ""))
        return None

    @property
    def by_family(self) -> bool:
        """Are there kernel rows of the same kind as the bytes of the whole step?"""
        return self.kernels is not None and self.kernels.source == self.source

    @cached_property
    def family_parts(self) -> dict[str, float]:
        """What the bytes of the whole step are made of: families, and as UNSEEN what its kernels leave over."""
        parts = self.kernels.bytes_by_family() if self.kernels else {}
        whole = self.dram_bytes or 0.0
        rest = whole - sum(parts.values())
        return parts | ({UNSEEN: rest} if rest > SMALLEST * whole else {})

    @cached_property
    def explanation(self) -> Explanation | None:
        """Which families make the difference to ordinary training; None unless kernels of both were looked at alike."""
        alike = kernels_alike([self, self.standard]) if self.standard else None
        if alike is None:
            return None
        mine, theirs = (kernels.bytes_by_family() for kernels in alike)
        extra = [(family, mine.get(family, 0) - theirs.get(family, 0)) for family in FAMILIES]
        return Explanation(alike[0], sorted((part for part in extra if part[1]), key=lambda part: -part[1]))


@dataclass(frozen=True)
class Explanation:
    """DRAM bytes beyond ordinary training's, family by family, most first; below zero where a method moves less."""

    kernels: KernelRows
    extra: list[tuple[str, float]]

    @property
    def total(self) -> float:
        return sum(count for _, count in self.extra)


def kernels_alike(traffics: Sequence[Traffic]) -> list[KernelRows] | None:
    """Kernel rows of all, from one source: measured, or else all estimates. None if some have neither."""
    for source in (MEASURED, ESTIMATE):
        found = [rows for traffic in traffics if (rows := traffic.kernels_of(source))]
        if len(found) == len(traffics):
            return found
    return None


@once_a_row
def traffic_of(row: Row) -> Traffic | None:
    """None for a row without an `ncu` result."""
    if not (data := row.ncu):
        return None
    spec, estimate = row.spec, data.get("estimate", {})
    read, written = (data["traffic"].get(name) for name in (READ, WRITE))
    operations = data.get("flops", {})
    counted = float(operations.get("total", sum(operations.values())))
    flops = counted or estimate.get("flops", {}).get("total")
    return Traffic(
        row,
        data,
        estimate,
        data.get("ceilings", {}),
        dram_bytes=None if read is None or written is None else read + written,
        flops=flops,
        flops_estimated=data["source"] == ESTIMATE or (not counted and flops is not None),
        seconds=_divide(row.median_ms, 1e3),
        items=(spec["batch_size"] * length, "token")
        if (length := spec.get("seq_len"))
        else (spec["batch_size"], "sample"),
    )


def by_size(rows: Sequence[Row], is_wanted: Callable[[Traffic], object] = bool) -> list[list[Traffic]]:
    """The traffic of rows that are compared with each other, as far as it is wanted; no empty groups."""
    groups = ([t for row in group if (t := traffic_of(row)) and is_wanted(t)] for group in group_by_size(rows))
    return [group for group in groups if group]


def _subtract(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by

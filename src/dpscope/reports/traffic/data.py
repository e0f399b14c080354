"""What a step moves, and what follows from it: pure functions of rows.

Bytes come from the instrument `ncu`: counted by the GPU, or estimated from tensor sizes. Times come from the unprofiled
run of the same spec (the instrument `time`), since a profiler stretches a step. The two kinds of bytes are never
compared with each other, except to say how far the estimate is off.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dpscope.reports.tables import STANDARD, Row, group_by_size
from dpscope.vocabulary.families import FAMILIES, OTHER

MEASURED, ESTIMATE = "measured", "estimate"
READ, WRITE = "dram_read_bytes", "dram_write_bytes"

APPROXIMATELY = "≈"  # before every estimated number
SMALLEST = 0.01  # of a method's bytes or time: what is below is not worth a word
UNSEEN = "not seen kernel by kernel"


@dataclass(frozen=True)
class KernelRows:
    """Where bytes go, kernel by kernel (or operator by operator, in an estimate)."""

    rows: list[dict[str, Any]]
    source: str
    calls_seen: int
    calls_total: int | None
    note: str

    @property
    def complete(self) -> bool:
        return self.calls_total is None or self.calls_seen >= self.calls_total

    def bytes_by_family(self) -> dict[str, int]:
        """DRAM bytes of each family that moved any, in the families' order."""
        totals = dict.fromkeys(FAMILIES, 0)
        for row in self.rows:
            family = row.get("family")
            totals[family if family in totals else OTHER] += moved(row)
        return {family: count for family, count in totals.items() if count}


def moved(row: dict[str, Any]) -> int:
    """DRAM bytes of one kernel row, read and written."""
    return int(row.get(READ) or 0) + int(row.get(WRITE) or 0)


@dataclass(frozen=True)
class Traffic:
    """One row's bytes. Whatever is not known is None."""

    row: Row
    standard: Traffic | None  # of the same size and the same source

    @property
    def data(self) -> dict[str, Any]:
        return self.row.ncu

    @property
    def source(self) -> str:
        return MEASURED if self.data.get("source") == MEASURED else ESTIMATE

    @property
    def estimated(self) -> bool:
        return self.source == ESTIMATE

    @property
    def estimate(self) -> dict[str, Any]:
        return self.data.get("estimate") or {}

    def figure(self, name: str) -> float | None:
        """A count of bytes by its name in the result file."""
        value = (self.data.get("traffic") or {}).get(name)
        if value is None and self.estimated:
            value = self.estimate.get(name)
        return value

    @property
    def dram_bytes(self) -> float | None:
        return _sum(self.figure(READ), self.figure(WRITE))

    @property
    def flops(self) -> float | None:
        """Of one step, as far as they were counted; the operators' own where no counter saw any (FP32 in a range)."""
        return self._counted_flops or (self.estimate.get("flops") or {}).get("total")

    @property
    def flops_estimated(self) -> bool:
        """Are they those of torch's formulas, and not of a counter?"""
        return self.estimated or (not self._counted_flops and self.flops is not None)

    @property
    def _counted_flops(self) -> float:
        counted = self.data.get("flops") or {}
        return float(counted.get("total", sum(counted.values())))

    @property
    def ratio(self) -> float | None:
        """DRAM bytes, as a multiple of ordinary training's."""
        return None if self.standard is None else _divide(self.dram_bytes, self.standard.dram_bytes)

    @property
    def items(self) -> tuple[int, str]:
        """How many of what the step worked on."""
        spec = self.row.first.spec
        length = spec.get("seq_len")
        return (spec["batch_size"] * length, "token") if length else (spec["batch_size"], "sample")

    @property
    def bytes_per_item(self) -> float | None:
        return _divide(self.dram_bytes, self.items[0])

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each DRAM byte."""
        return _divide(self.flops, self.dram_bytes)

    @property
    def seconds(self) -> float | None:
        """Median time of an unprofiled step."""
        return _divide(self.row.median_ms, 1e3)

    @property
    def bandwidth(self) -> float | None:
        """DRAM bytes a second over an unprofiled step."""
        return _divide(self.dram_bytes, self.seconds)

    @property
    def flop_rate(self) -> float | None:
        return _divide(self.flops, self.seconds)

    @property
    def ceilings(self) -> dict[str, Any]:
        return self.data.get("ceilings") or {}

    @property
    def bandwidth_fraction(self) -> float | None:
        """Of what a large copy reaches on this machine."""
        return _divide(self.bandwidth, self.ceilings.get("dram_bytes_per_second"))

    @property
    def extra_seconds(self) -> float | None:
        """How much longer a step takes than ordinary training's."""
        return _difference(self.seconds, self.standard.seconds) if self.standard else None

    @property
    def extra_seconds_at_peak(self) -> float | None:
        """What moving the extra bytes takes at this machine's measured bandwidth: no schedule can be faster."""
        if self.standard is None:
            return None
        extra = _difference(self.dram_bytes, self.standard.dram_bytes)
        return _divide(extra, self.ceilings.get("dram_bytes_per_second"))

    def estimate_error(self, name: str) -> float | None:
        """(estimate - measurement) / measurement, where both exist."""
        known, guess = self.figure(name), self.estimate.get(name)
        if self.estimated or guess is None or not known:
            return None
        return float(guess / known - 1)

    @property
    def kernels(self) -> KernelRows | None:
        """Measured kernel rows where there are any, or else the estimate's."""
        return self.kernels_of(MEASURED) or self.kernels_of(ESTIMATE)

    def kernels_of(self, source: str) -> KernelRows | None:
        held = (self.data.get("kernels"), self.source), (self.estimate.get("kernels"), ESTIMATE)
        for found, whose in held:
            if whose == source and found and found.get("rows"):
                rows = [row for row in found["rows"] if isinstance(row, dict)]
                calls = sum(int(row.get("calls") or 1) for row in rows)
                seen, total = found.get("calls_seen", calls), found.get("calls_total")
                return KernelRows(rows, source, seen, total, str(found.get("note") or ""))
        return None

    @property
    def by_family(self) -> bool:
        """Are there kernel rows of the same kind as the bytes of the whole step?"""
        return self.kernels is not None and self.kernels.source == self.source

    def family_parts(self) -> dict[str, float]:
        """What the bytes of the whole step are made of: families, and as UNSEEN what its kernels leave over."""
        parts: dict[str, float] = {**self.kernels.bytes_by_family()} if self.kernels else {}
        whole = self.dram_bytes or 0.0
        rest = whole - sum(parts.values())
        return parts | ({UNSEEN: rest} if rest > SMALLEST * whole else {})

    @property
    def explanation(self) -> Explanation | None:
        """Which families make the difference to ordinary training; None unless kernels of both were looked at alike."""
        if self.standard is None:
            return None
        own, other = kernels_alike([self, self.standard]) or (None, None)
        if own is None or other is None:
            return None
        mine, theirs = own.bytes_by_family(), other.bytes_by_family()
        extra = [(family, mine.get(family, 0) - theirs.get(family, 0)) for family in FAMILIES]
        return Explanation(own, sorted((part for part in extra if part[1]), key=lambda part: -part[1]))


@dataclass(frozen=True)
class Explanation:
    """DRAM bytes beyond ordinary training's, family by family, most first; below zero where a method moves less."""

    kernels: KernelRows
    extra: list[tuple[str, int]]

    @property
    def total(self) -> int:
        return sum(count for _, count in self.extra)


def kernels_alike(traffics: Sequence[Traffic]) -> list[KernelRows] | None:
    """Kernel rows of all, from one source: measured, or else all estimates. None if some have neither."""
    for source in (MEASURED, ESTIMATE):
        found = [rows for traffic in traffics if (rows := traffic.kernels_of(source))]
        if len(found) == len(traffics):
            return found
    return None


def compare_traffic(rows: Sequence[Row]) -> list[Traffic]:
    """The traffic of every row that has any, each next to ordinary training of its size; sizes stay together."""
    compared = []
    for group in group_by_size(rows):
        found = [Traffic(row, None) for row in group if row.ncu]
        standards = {traffic.source: traffic for traffic in found if traffic.row.method == STANDARD}
        compared += [Traffic(traffic.row, standards.get(traffic.source)) for traffic in found]
    return compared


def by_size(traffics: Sequence[Traffic]) -> list[list[Traffic]]:
    """What is compared with each other, in order of first appearance."""
    groups: dict[Hashable, list[Traffic]] = {}
    for traffic in traffics:
        groups.setdefault(traffic.row.comparison, []).append(traffic)
    return list(groups.values())


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by

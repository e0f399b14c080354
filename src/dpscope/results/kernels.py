"""DRAM bytes of a step, kernel by kernel, as the instrument `ncu` wrote them down."""

from __future__ import annotations

from dataclasses import dataclass

from dpscope.results.payloads.ncu import ESTIMATE, READ, WRITE, KernelRow, NcuPayload
from dpscope.vocabulary.families import FAMILIES, OTHER


@dataclass(frozen=True)
class KernelRows:
    """Kernels of one source; in an estimate, operators."""

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
        """Return the DRAM bytes of each family that moved any, in the families' order."""
        totals: dict[str, float] = dict.fromkeys(FAMILIES, 0)
        for row in self.rows:
            totals[row["family"] if row["family"] in totals else OTHER] += moved(row)
        return {family: count for family, count in totals.items() if count}


def moved(row: KernelRow) -> float:
    """Return the DRAM bytes of one kernel row, read and written."""
    return (row.get(READ) or 0) + (row.get(WRITE) or 0)


def kernels_in(payload: NcuPayload, source: str) -> KernelRows | None:
    """Return the measured rows, or those of the estimate, which may exist beside a measurement."""
    own, estimated = payload.get("kernels", {}), payload.get("estimate", {}).get("kernels", {})
    for found, whose in ((own, payload["source"]), (estimated, ESTIMATE)):
        if whose == source and (rows := found.get("rows")):
            calls = found.get("calls_seen", sum(row.get("calls", 1) for row in rows))
            return KernelRows(rows, source, calls, found.get("calls_total"), found.get("note", ""))
    return None

"""Payload of the instrument `ncu`: the bytes of one step, by kernel too, counted by Nsight Compute or estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from typing_extensions import NotRequired, TypedDict

from dpscope.vocabulary.phases import FAMILIES, OTHER

MEASURED: Final = "measured"
ESTIMATE: Final = "estimate"
READ: Final = "dram_read_bytes"
WRITE: Final = "dram_write_bytes"
Direction = Literal["dram_read_bytes", "dram_write_bytes"]

# Every figure of a step -> its heading in the tables of a summary; none: it is in traffic.csv alone.
# `instruments.ncu.metrics.TRAFFIC_FORMULAS` says how each is counted.
BYTES = {
    READ: "DRAM read",
    WRITE: "written",
    "l2_read_bytes": "L2 read",
    "l2_write_bytes": "L2 written",
    "l2_tex_read_bytes": "",
    "l2_tex_write_bytes": "",
    "l2_to_sm_bytes": "L2 to SM",
    "sm_to_l2_bytes": "SM to L2",
    "global_load_bytes": "",
    "global_store_bytes": "",
}
# What is added up over the launches of a kernel.
KERNEL_FIGURES = ("calls", READ, WRITE, "l2_to_sm_bytes", "flops", "time_ns")


class KernelRow(TypedDict):
    """A kernel, or in an estimate an operator, in one phase: the sum over its launches."""

    name: str
    family: str
    phase: NotRequired[str | None]
    calls: NotRequired[int]
    dram_read_bytes: NotRequired[int | None]
    dram_write_bytes: NotRequired[int | None]
    l2_to_sm_bytes: NotRequired[int | None]
    flops: NotRequired[int | None]
    time_ns: NotRequired[int | None]


class Kernels(TypedDict, total=False):
    """Counts by kernel; empty if there are none."""

    rows: list[KernelRow]
    calls_seen: int
    calls_total: int | None
    note: str


class Estimate(TypedDict, total=False):
    """Estimated bytes; empty if the estimate failed, without `kernels` if those replace measured ones."""

    dram_read_bytes: int
    dram_write_bytes: int
    flops: dict[str, int]
    kernels: Kernels
    blind_spots: list[str]


class Ceilings(TypedDict, total=False):
    """Best rates of this machine; empty without a GPU."""

    dram_bytes_per_second: float
    tensor_flops_per_second: float
    fp32_flops_per_second: float
    how: str


class Counted(TypedDict):
    """Totals of one range."""

    traffic: dict[str, int]  # figures named in `BYTES`
    flops: NotRequired[dict[str, int]]
    metrics: NotRequired[dict[str, Any]]  # as ncu names and gives them
    missing: NotRequired[dict[str, str]]  # figure -> why it is not there


class NcuPayload(Counted):
    source: Literal["measured", "estimate"]
    reason: NotRequired[str | None]  # why it is an estimate
    ncu_version: NotRequired[str | None]
    estimate: NotRequired[Estimate]
    kernels: NotRequired[Kernels]
    ceilings: NotRequired[Ceilings]
    command: NotRequired[list[str]]


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

"""Where the bytes of a step go: families of kernels side by side, and the kernels that move most."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from dpscope.reports.text_table import bare_table, table_of
from dpscope.reports.traffic.data import SMALLEST, Traffic, kernels_alike, marked_estimate, moved
from dpscope.units import MISSING, format_traffic
from dpscope.vocabulary.families import FAMILIES, FAMILY_LABELS

NARROW = 90  # columns of a terminal
TOP_KERNELS = 5  # of each method
OTHERS = "others"  # kernels that the measurement added up


def kernels_part(groups: Sequence[Sequence[Traffic]], width: int) -> list[RenderableType]:
    """The rows with kernels, or operators, of the size that moves most; traffic_kernels.csv has all sizes."""
    looked_at = [[t for t in group if t.kernels] for group in groups]
    largest = max(looked_at, key=lambda group: max((t.dram_bytes or 0 for t in group), default=-1), default=[])
    return [*_families(largest), *(part for t in largest for part in _top_kernels(t, narrow=width < NARROW))]


def _families(group: Sequence[Traffic]) -> list[RenderableType]:
    """Where the bytes of rows of one size go, all of them seen in the same way."""
    alike = kernels_alike(group)
    if not alike:
        return []
    shares = [kernels.bytes_by_family() for kernels in alike]
    estimated = alike[0].estimated
    table = bare_table("", *(traffic.method for traffic in group))
    for family in FAMILIES:
        if any(share.get(family, 0) >= SMALLEST * sum(share.values()) for share in shares):
            counts = [format_traffic(share.get(family)) for share in shares]
            table.add_row(FAMILY_LABELS[family], *(marked_estimate(count, estimated) for count in counts))
    told = "estimate, by operator" if estimated else "by kernel"
    heading = f"Where the DRAM bytes go: {group[0].row.size} ({told})"
    return ["", Text(heading, style="bold"), table]


def _top_kernels(traffic: Traffic, *, narrow: bool) -> list[RenderableType]:
    """The measured kernels that move most."""
    kernels = traffic.kernels
    if kernels is None or kernels.estimated:
        return []
    total = sum(map(moved, kernels.rows)) or 1
    named = [row for row in kernels.rows if row["name"] != OTHERS]
    table = table_of(
        [sorted(named, key=moved, reverse=True)[:TOP_KERNELS]],
        {
            f"{traffic.method}: kernel": lambda row: row["name"],
            "family": lambda row: row["family"],
            **({} if narrow else {"phase": lambda row: row.get("phase") or MISSING}),
            "calls": lambda row: str(row.get("calls", 1)),
            "DRAM": lambda row: format_traffic(moved(row)),
            "share": lambda row: f"{100 * moved(row) / total:.0f}%",
        },
        left=("family", "phase"),
    )
    table.columns[0].max_width = 30 if narrow else 52
    return ["", table]

"""Where the bytes of a step go: families of kernels side by side, and the kernels that move most."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.traffic.data import APPROXIMATELY, ESTIMATE, SMALLEST, Traffic, by_size, kernels_alike, moved
from dpscope.reports.words import size_in_words
from dpscope.units import MISSING, format_traffic
from dpscope.vocabulary.families import FAMILIES, FAMILY_LABELS

NARROW = 90  # columns of a terminal
TOP_KERNELS = 5  # of each method
OTHERS = "others"  # kernels that the measurement added up


def kernels_part(traffics: Sequence[Traffic], width: int) -> list[RenderableType]:
    """Nothing unless some row was looked at kernel by kernel, or operator by operator."""
    largest = _largest(traffics)
    return [*_families(largest), *_top_kernels(largest, narrow=width < NARROW)]


def _largest(traffics: Sequence[Traffic]) -> list[Traffic]:
    """The rows with kernels, of the size that moves most: what a summary shows. traffic_kernels.csv has all sizes."""
    groups = [[t for t in group if t.kernels] for group in by_size(traffics)]
    return max(groups, key=lambda group: max((t.dram_bytes or 0 for t in group), default=-1), default=[])


def _families(group: Sequence[Traffic]) -> list[RenderableType]:
    """Where the bytes of rows of one size go, all of them seen in the same way."""
    alike = kernels_alike(group)
    if not alike:
        return []
    shares = [kernels.bytes_by_family() for kernels in alike]
    estimated = alike[0].source == ESTIMATE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for traffic in group:
        table.add_column(traffic.row.method, justify="right", no_wrap=True)
    for family in FAMILIES:
        if any(share.get(family, 0) >= SMALLEST * sum(share.values()) for share in shares):
            table.add_row(FAMILY_LABELS[family], *(_family_bytes(share.get(family, 0), estimated) for share in shares))
    told = "estimate, by operator" if estimated else "by kernel"
    return [
        "",
        Text(f"Where the DRAM bytes go: {size_in_words(group[0].row.first.spec)} ({told})", style="bold"),
        table,
    ]


def _family_bytes(count: int, estimated: bool) -> str:
    return (APPROXIMATELY if estimated else "") + format_traffic(count) if count else MISSING


def _top_kernels(traffics: Sequence[Traffic], *, narrow: bool) -> list[RenderableType]:
    """The measured kernels that move most, of each row that has them."""
    parts: list[RenderableType] = []
    for traffic in traffics:
        kernels = traffic.kernels
        if kernels is None or kernels.source == ESTIMATE:
            continue
        total = sum(map(moved, kernels.rows)) or 1
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(f"{traffic.row.method}: kernel", no_wrap=True, max_width=30 if narrow else 52)
        for heading in ("family", *(() if narrow else ("phase",))):
            table.add_column(heading, no_wrap=True)
        for heading in ("calls", "DRAM", "share"):
            table.add_column(heading, justify="right", no_wrap=True)
        named = [row for row in kernels.rows if row.get("name") != OTHERS]
        for row in sorted(named, key=moved, reverse=True)[:TOP_KERNELS]:
            phase = () if narrow else (str(row.get("phase") or MISSING),)
            figures = (str(row.get("calls") or 1), format_traffic(moved(row)), f"{100 * moved(row) / total:.0f}%")
            table.add_row(str(row.get("name")), str(row.get("family")), *phase, *figures)
        parts += ["", table]
    return parts

"""Sections of the page: the ten-second answer at each size, a card for each method, and links to files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from dpscope.reports.doubt import EXPLAINED, marked
from dpscope.reports.palette import looks_of
from dpscope.reports.report import Report, Size
from dpscope.reports.story import Story
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import traffic_of
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, format_traffic
from dpscope.vocabulary.statuses import status_named


def make_cards(size: Size, story: Story) -> list[dict[str, Any]]:
    """The winner has a badge; a method without figures, what became of it."""
    return [
        {
            **{"row": row, "colour": looks_of(size.rows)[row.method]["colour"], "figures": _figures(row)},
            "badge": story.badge if row.method == story.winner else "",
            "outcome": "" if row.result.ok else status_named(row.result.status).outcome,
        }
        for row in size.rows
    ]


def first_size(sizes: Sequence[Size]) -> int:
    """Where the reader begins: the size most is known of, and of those the largest."""
    return max(range(len(sizes)), key=lambda place: (*_known(sizes[place].rows), -place), default=0)


def _known(rows: Sequence[Row]) -> tuple[int, int, int]:
    instruments = {result.instrument for row in rows for result in row.ended_well}
    figures = sum((row.median_ms is not None) + (row.peak_bytes is not None) for row in rows)
    return len(instruments), figures, rows[0].samples * (rows[0].spec.get("seq_len") or 1)


def _figures(row: Row) -> list[dict[str, str]]:
    """Ratios to ordinary training with the absolute figures below; what makes one doubtful, for whoever asks."""
    # `12.3 ms, 650 samples/s`; tokens where there is a sequence
    rates = [f"{format_throughput(speed)} {name}" for name, speed in row.speeds.items()]
    time = ", ".join(marked(text, row.time_doubt) for text in (format_ms(row.median_ms), *rates[-1:]))
    figures = [
        ("time", format_ratio(row.time_ratio), time, EXPLAINED.get(row.ratio_doubt, "")),
        ("memory", format_ratio(row.memory_ratio), format_bytes(row.peak_bytes), ""),
    ]
    if traffic := traffic_of(row):
        ratio, count = format_ratio(traffic.ratio), format_traffic(traffic.dram_bytes)
        figures.append(("DRAM bytes", traffic.show(ratio), traffic.show(count), ""))
    named = [dict(zip(("name", "ratio", "absolute", "doubt"), figure, strict=True)) for figure in figures]
    return [figure for figure in named if figure["absolute"] != MISSING]


def files_beside(report: Report) -> list[tuple[str, str, str, str]]:
    """Row, instrument, name and link of those that are there now. A page that is sent alone has none, nor has one whose
    folder is not known."""
    found = [
        (f"{row.method}, {size.label}", instrument, PurePosixPath(path).name, quote(path))
        for size in report.sizes
        for row in size.rows
        for instrument, result in row.measured.items()
        for path in result.files.values()
        if _is_below(path, report.folder)
    ]
    return list(dict.fromkeys(found))


def _is_below(path: object, folder: Path | None) -> bool:
    """Paths come from results, which may be anybody's: only what is a file in the folder itself is linked."""
    if folder is None or not isinstance(path, str) or "\0" in path:
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and (folder / pure).is_file()

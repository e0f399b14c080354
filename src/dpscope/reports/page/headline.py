"""The ten-second answer at each size: a card for each method, below the sentences of its story."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscope.reports.doubt import EXPLAINED, marked
from dpscope.reports.palette import looks_of
from dpscope.reports.settings import Size
from dpscope.reports.story import Story
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import traffic_of
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, format_traffic
from dpscope.vocabulary.statuses import status_named


@dataclass(frozen=True)
class CardFigure:
    """A ratio to ordinary training with the absolute figure below it."""

    name: str
    ratio: str
    absolute: str
    doubt: str = ""  # what makes it doubtful, for whoever asks what the mark means


@dataclass(frozen=True)
class Card:
    row: Row
    colour: str
    badge: str  # of the winner
    outcome: str  # what became of a method that has no figures
    figures: list[CardFigure]


def make_cards(size: Size, story: Story) -> list[Card]:
    looks = looks_of(size.rows)
    return [
        Card(
            row=row,
            colour=looks[row.method]["colour"],
            badge=story.badge if row.method == story.winner else "",
            outcome="" if row.result.ok else status_named(row.result.status).outcome,
            figures=[figure for figure in _figures(row) if figure.absolute != MISSING],
        )
        for row in size.rows
    ]


def first_size(sizes: Sequence[Size]) -> int:
    """Where the reader begins: the size most is known of, and of those the largest."""
    return max(range(len(sizes)), key=lambda place: (*_known(sizes[place].rows), -place), default=0)


def _known(rows: Sequence[Row]) -> tuple[int, int, int]:
    instruments = {result.instrument for row in rows for result in row.ended_well}
    figures = sum((row.median_ms is not None) + (row.peak_bytes is not None) for row in rows)
    return len(instruments), figures, rows[0].samples * (rows[0].spec.get("seq_len") or 1)


def _figures(row: Row) -> list[CardFigure]:
    # `12.3 ms, 650 samples/s`; tokens where there is a sequence
    rates = [f"{format_throughput(speed)} {name}" for name, speed in row.speeds.items()]
    time = ", ".join(marked(text, row.time_doubt) for text in (format_ms(row.median_ms), *rates[-1:]))
    figures = [
        CardFigure("time", format_ratio(row.time_ratio), time, EXPLAINED.get(row.ratio_doubt, "")),
        CardFigure("memory", format_ratio(row.memory_ratio), format_bytes(row.peak_bytes)),
    ]
    if traffic := traffic_of(row):
        ratio, count = format_ratio(traffic.ratio), format_traffic(traffic.dram_bytes)
        figures.append(CardFigure("DRAM bytes", traffic.show(ratio), traffic.show(count)))
    return figures

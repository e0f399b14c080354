"""The ten-second answer at each size: sentences, and a card for each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpscope.reports.doubt import EXPLAINED, marked
from dpscope.reports.page.looks import looks_of
from dpscope.reports.settings import Size
from dpscope.reports.story import Story
from dpscope.reports.tables import RATES, Row
from dpscope.reports.traffic.data import Traffic, traffic_of
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, format_traffic
from dpscope.vocabulary.statuses import status_named


@dataclass(frozen=True)
class Figure:
    """A ratio to ordinary training with the absolute figure below it."""

    name: str
    ratio: str
    absolute: str
    doubt: str = ""  # what makes it doubtful, for whoever asks what the mark means


@dataclass(frozen=True)
class Card:
    method: str
    colour: str
    badge: str  # of the winner
    outcome: str  # of a method that has no figures: what became of it
    reason: str
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Headline:
    setting: str
    size: str
    sentences: list[str]
    cards: list[Card]


def make_headline(size: Size, story: Story) -> Headline:
    badges = {story.winner: story.badge}
    looks = looks_of(size.rows)
    cards = [_card(row, looks[row.method]["colour"], badges.get(row.method, ""), traffic_of(row)) for row in size.rows]
    return Headline(size.setting, size.size, [*story.sentences, *story.notes], cards)


def first_size(sizes: Sequence[Size]) -> int:
    """Where the reader begins: the size most is known of, and of those the largest."""
    if not sizes:
        return 0
    return max(range(len(sizes)), key=lambda place: (*_known(sizes[place].rows), -place))


def _known(rows: Sequence[Row]) -> tuple[int, int, int]:
    spec = rows[0].first.spec
    instruments = {name for row in rows for name, result in row.measured.items() if result.ok}
    figures = sum((row.median_ms is not None) + (row.peak_bytes is not None) for row in rows)
    return (len(instruments), figures, spec["batch_size"] * (spec.get("seq_len") or 1))


def _card(row: Row, colour: str, badge: str, traffic: Traffic | None) -> Card:
    outcome = "" if row.result.ok else status_named(row.result.status).outcome
    figures = [
        Figure("time", format_ratio(row.time_ratio), _time(row), EXPLAINED.get(row.ratio_doubt, "")),
        Figure("memory", format_ratio(row.memory_ratio), format_bytes(row.peak_bytes)),
    ]
    if traffic and traffic.dram_bytes is not None:
        figures.append(_bytes_moved(traffic))
    shown = [figure for figure in figures if figure.absolute != MISSING]
    return Card(row.method, colour, badge, outcome, row.result.reason or "", shown)


def _time(row: Row) -> str:
    """`12.3 ms, 650 samples/s`; tokens where there is a sequence."""
    rates = [(name, rate(row)) for name, rate in RATES.items() if rate(row) is not None]
    shown = [format_ms(row.median_ms), *(f"{format_throughput(rate)} {name}" for name, rate in rates[-1:])]
    return ", ".join(marked(text, row.time_doubt) for text in shown)


def _bytes_moved(traffic: Traffic) -> Figure:
    ratio, count = format_ratio(traffic.ratio), format_traffic(traffic.dram_bytes)
    return Figure("DRAM bytes", traffic.show(ratio), traffic.show(count))

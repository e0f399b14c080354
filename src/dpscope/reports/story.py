"""Story of a comparison, in sentences: which private method to take at a size, what it costs and saves.

Differences within the spread of the measurement do not count: times whose 10th to 90th percentiles overlap are equal,
and so are peaks within `SAME_MEMORY` of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscope.reports.tables import ADVICE, EXPLAINED, Row
from dpscope.reports.traffic.data import traffic_of
from dpscope.units import MISSING, format_bytes, format_duration, format_ms, format_ratio
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.settings import EAGER
from dpscope.vocabulary.statuses import OOM, STATUSES, status_named

SAME_MEMORY = 0.01
USUAL = "flat"  # what people have who do not choose: savings are told against it


@dataclass(frozen=True)
class Story:
    """Story of one size: the best private method, and the sentences about it."""

    winner: str | None
    badge: str  # what the winner is best at, in a word or two
    sentences: list[str]
    notes: list[str]  # of its rows; other sizes often have the same


def tell(rows: Sequence[Row]) -> Story:
    """Return the story of rows that are compared with each other."""
    private = [row for row in rows if row.method != STANDARD]
    leaders = _leaders(private)
    winner, (praise, badge) = leaders.winner, leaders.praise
    if winner:
        verdict = [f"Of the private methods {winner.method} {praise}: {cost_in_words(winner)}."]
        verdict += _of_savings(winner, [row for row in private if row is not winner])
    else:
        # Without a winner each method is told for itself.
        timed = [row for row in private if row.median_ms is not None and not row.ratio_doubt]
        known = [row for row in private if row.peak_bytes is not None or row in timed]
        verdict = [*leaders.undecided(), *(f"{row.method} takes {cost_in_words(row)}." for row in known)]
    sentences = [*verdict, *_of_doubt(rows), *_of_failed(rows, private), *_of_no_standard(rows)]
    notes = [f"{row.method}: {note}" for row in rows for note in row.notes]
    return Story(winner.method if winner else None, badge if winner else "", sentences, notes)


@dataclass(frozen=True)
class Leaders:
    """The private rows that no other private row beats in time or memory. Empty if there is nothing to compare."""

    time: list[Row]
    memory: list[Row]

    @property
    def praise(self) -> tuple[str, str]:
        """Words for the winner, for a sentence and for a label."""
        if self.time and self.memory:
            return "costs least", "costs least"
        return ("is the fastest", "fastest") if self.time else ("needs the least memory", "least memory")

    @property
    def unbeaten(self) -> list[Row]:
        """True if the winner leads in all compared quantities."""
        return [row for row in self.time or self.memory if row in (self.memory or self.time)]

    @property
    def winner(self) -> Row | None:
        return self.unbeaten[0] if len(self.unbeaten) == 1 else None

    def undecided(self) -> list[str]:
        """Return why there is no winner among several methods."""
        if not self.time and not self.memory:
            return []
        if not self.unbeaten:
            is_, needs = ("is" if len(self.time) == 1 else "are"), ("needs" if len(self.memory) == 1 else "need")
            fastest = f"{_names(self.time)} {is_} the fastest ({format_ms(self.time[0].median_ms)})"
            least = f"{_names(self.memory)} {needs} the least memory ({format_bytes(self.memory[0].peak_bytes)})"
            return [f"No method is best at both: {fastest}, {least}."]
        if not self.time:
            return [f"{_names(self.unbeaten)} need the same memory, to within {SAME_MEMORY:.0%}."]
        return [f"Between {_names(self.unbeaten)} the measurement sees no difference beyond its spread."]


def _leaders(private: Sequence[Row]) -> Leaders:
    timed = [row for row in private if row.median_ms is not None]
    sized = [row for row in private if row.peak_bytes is not None]
    comparable = len(timed) > 1 and not any(row.ratio_doubt for row in timed)
    fastest = min(timed, key=lambda row: row.median_ms or 0.0, default=None)
    leanest = min(sized, key=lambda row: row.peak_bytes or 0.0, default=None)
    time = [row for row in timed if fastest and (row is fastest or not beyond_spread(row, fastest))]
    memory = [row for row in sized if leanest and _same_memory(row, leanest)]
    return Leaders(time if comparable else [], memory if len(sized) > 1 else [])


def beyond_spread(row: Row, other: Row) -> bool:
    """Return whether the two time ranges, 10th to 90th percentile, do not overlap. False if either is doubtful."""
    if row.time_doubt or other.time_doubt or row.spread_ms is None or other.spread_ms is None:
        return False
    return row.spread_ms[0] > other.spread_ms[1] or row.spread_ms[1] < other.spread_ms[0]


def _same_memory(row: Row, other: Row) -> bool:
    one, two = row.peak_bytes or 0.0, other.peak_bytes or 0.0
    return abs(one - two) <= SAME_MEMORY * max(one, two)


def _of_savings(winner: Row, others: Sequence[Row]) -> list[str]:
    """Return the certain savings in time and memory against Opacus's methods, or else the next best."""
    usual = next((row for row in others if row.method == USUAL), None) or min(
        others, key=lambda row: (row.median_ms is None, row.median_ms or 0.0, row.peak_bytes or 0.0)
    )
    saved = []
    mine, theirs = winner.median_ms, usual.median_ms
    if mine is not None and theirs is not None and beyond_spread(usual, winner) and mine < theirs:
        saved.append(f"{format_ms(theirs - mine)} ({1 - mine / theirs:.0%} of the time)")
    small, large = winner.peak_bytes, usual.peak_bytes
    if small is not None and large is not None and small < large and not _same_memory(winner, usual):
        saved.append(f"{format_bytes(large - small)} ({1 - small / large:.0%} of the memory)")
    return [f"Against {usual.method} it saves {' and '.join(saved)} a step."] if saved else []


def cost_in_words(row: Row) -> str:
    """Return `1.09× the time and 0.96× the memory of ordinary training`; absolute without a standard."""
    ratios = {"time": None if row.ratio_doubt else row.time_ratio, "memory": row.memory_ratio}
    parts = [f"{format_ratio(ratio)} the {what}" for what, ratio in ratios.items() if ratio is not None]
    if (moved := traffic_of(row)) and moved.ratio is not None:
        parts.append(f"{moved.show(format_ratio(moved.ratio))} the DRAM bytes")
    if parts:
        return f"{_and(parts)} of {ordinary_training(row)}"
    figures = (format_ms(None if row.time_doubt else row.median_ms), format_bytes(row.peak_bytes))
    return _and([figure for figure in figures if figure != MISSING]) + " a step"


def _of_doubt(rows: Sequence[Row]) -> list[str]:
    """Return which methods' times allow no verdict, and the remedy."""
    timed = [row for row in rows if row.median_ms is not None and row.method != STANDARD]
    doubtful = {reason: [row for row in timed if row.ratio_doubt == reason] for reason in EXPLAINED}
    return [
        f"No verdict on the time of {_names(found)}: {EXPLAINED[reason]}. {ADVICE[reason]}."
        for reason, found in doubtful.items()
        if found
    ]


def _of_failed(rows: Sequence[Row], private: Sequence[Row]) -> list[str]:
    sentences = []
    for name in dict.fromkeys([*STATUSES, *(row.result.status for row in rows)]):
        status, ended_so = status_named(name), [row for row in rows if row.result.status == name]
        if ended_so and status.is_failure:
            sentences.append(f"{_names(ended_so)} {status.outcomes if len(ended_so) > 1 else status.outcome} here.")
    fits = [row for row in private if row.result.ok]
    if len(fits) == 1 and len(private) > 1 and all(row.result.status == OOM for row in private if row is not fits[0]):
        sentences.append(f"{fits[0].method} is the only private method that fits.")
    return sentences


def _of_no_standard(rows: Sequence[Row]) -> list[str]:
    standard = next((row for row in rows if row.method == STANDARD), None)
    if standard is not None and (standard.median_ms is not None or standard.peak_bytes is not None):
        return []
    what = "was not measured" if standard is None else "has no figures"
    return [f"There are no ratios: ordinary training (standard) {what} at this size."]


def _names(rows: Sequence[Row]) -> str:
    return _and([row.method for row in rows])


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def compilation_notes(rows: Sequence[Row]) -> list[str]:
    """Return what the ratios of compiled and captured rows are, and how long torch.compile took."""
    notes = []
    if any(row.eager_time_ratio for row in rows):
        ways = dict.fromkeys(row.way for row in rows if row.eager_time_ratio)
        notes += [
            f"× of rows ({way}) is the ratio to standard ({way}), × eager that to eager standard." for way in ways
        ]
    took = [f"{row.method} {format_duration(row.compilation['seconds'])}" for row in rows if row.compilation]
    if took:
        notes.append(f"Compilation, before warm-up and in no other figure: {', '.join(took)}.")
    return notes


def ordinary_training(row: Row) -> str:
    """Return the reference of a row's ratios, and its time relative to eager ordinary training."""
    if row.is_eager:
        return "ordinary training"
    ratio = None if row.eager_ratio_doubt else row.eager_time_ratio
    eager = "" if ratio is None else f", and {format_ratio(ratio)} the time of eager ordinary training"
    compiled = "" if row.field("compile") == EAGER else "compiled "
    graph = " as a CUDA graph" if row.field("cuda_graph") else ""
    return f"{compiled}ordinary training{graph}{eager}"

"""Quantities that two sweeps are compared by, and what counts as a change of each (docs/method.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from dpscope.reports.tables import FEW, FEWEST_STEPS, NO_SPREAD, REASONS, Row, marked
from dpscope.reports.traffic.data import marked_estimate, traffic_of
from dpscope.results.payloads.ncu import ESTIMATE
from dpscope.units import format_bytes, format_ms, format_ratio, format_traffic

SMALLEST_TIME = 0.01  # of the time before: two runs of one program on one GPU differ by about as much at the median
SMALLEST_COUNT = 0.005  # of peak memory, which repeats
SMALLEST_TRAFFIC = 0.02  # of DRAM bytes: what the GPU counts varies a little with its caches

SAME, WITHIN = "the same", "within spread"
ANOTHER_SOURCE, NO_FIGURES = "measured differently", ""
UNDECIDED = (*REASONS, ANOTHER_SOURCE)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One quantity of one row. A ratio's spread is the widest that its two rows allow."""

    value: float | None = None
    spread: tuple[float, float] | None = None  # 10th and 90th percentile
    doubt: str = ""  # what makes a time, or a ratio of times, doubtful
    steps: int | None = None  # that the spread is from
    source: str | None = None  # how it was measured


# Less (-1) or more (1) than before; otherwise the verdict in words: no change, or why it is undecided.
Judge = Callable[[Reading, Reading, float], "int | str"]
# Of a row, with the way in which its peak was measured: itself, and its ratio to standard of the same sweep.
Read = Callable[[Row, str], tuple[Reading, Reading]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Quantity:
    """Quantity to compare, and the words for less and more of it."""

    key: str
    less: str
    more: str
    title: str
    unit: str  # in the names of columns
    format: Callable[[float | None], str]
    judge: Judge
    read: Read
    tally: str = ""  # `2 larger in memory`
    noun: str = ""  # `Larger peak memory: …`
    rule: str = ""  # what `judge` asks for, in words
    how: str = ""  # what its chart shows and does not see; one without has no chart

    @cached_property
    def ratio(self) -> Quantity:
        return replace(self, key=f"{self.key}_ratio", less="lower", more="higher", unit="", format=format_ratio)


@dataclass(frozen=True)
class SweepChange:
    """Change of a quantity: before, now, and the verdict."""

    quantity: Quantity
    before: Reading
    now: Reading

    @property
    def known(self) -> bool:
        return self.before.value is not None or self.now.value is not None

    @property
    def verdict(self) -> str:
        """The quantity's word for less or more; or SAME, WITHIN, one of UNDECIDED, NO_FIGURES."""
        if self.before.value is None or self.now.value is None or self.before.value <= 0:
            return NO_FIGURES
        if self.before.source != self.now.source:
            return ANOTHER_SOURCE
        if self.before.value == self.now.value:
            return SAME
        found = self.quantity.judge(self.before, self.now, self.now.value / self.before.value - 1)
        return found if isinstance(found, str) else self.quantity.more if found > 0 else self.quantity.less

    @property
    def tone(self) -> str:
        return {self.quantity.less: "less", self.quantity.more: "more"}.get(self.verdict, "")

    @property
    def shown(self) -> tuple[str, str]:
        """Before and now with their unit; estimates and doubtful values are marked."""
        before, now = (
            marked_estimate(marked(self.quantity.format(each.value), each.doubt), each.source == ESTIMATE)
            for each in (self.before, self.now)
        )
        return before, now

    @property
    def relative(self) -> float | None:
        """Relative change: -0.2 is a fifth less than before. None if the two cannot be compared."""
        if self.verdict in (NO_FIGURES, ANOTHER_SOURCE):
            return None
        assert self.now.value is not None and self.before.value is not None
        return self.now.value / self.before.value - 1

    @property
    def range(self) -> tuple[float, float] | None:
        """The relative change from one end of the two spreads to the other."""
        if self.relative is None or self.before.spread is None or self.now.spread is None:
            return None
        (low, high), (low_now, high_now) = self.before.spread, self.now.spread
        return (low_now / high - 1, high_now / low - 1) if low > 0 else None


def judge_by_spread(before: Reading, now: Reading, relative: float) -> int | str:
    """Return a change if the two spreads do not overlap, both were steady, and it is large enough to repeat."""
    if before.spread is None or now.spread is None:
        return NO_SPREAD
    if doubt := next((reason for reason in (FEW, *REASONS) if reason in (before.doubt, now.doubt)), None):
        return doubt
    apart = before.spread[1] < now.spread[0] or now.spread[1] < before.spread[0]
    return _direction(relative) if apart and abs(relative) >= SMALLEST_TIME else WITHIN


def judge_by_share(before: Reading, now: Reading, relative: float, *, smallest: float) -> int | str:
    return _direction(relative) if abs(relative) > smallest else SAME


def _direction(relative: float) -> int:
    return 1 if relative > 0 else -1


def _time(row: Row, source: str) -> tuple[Reading, Reading]:
    reading = Reading(value=row.median_ms, spread=row.spread_ms, doubt=row.time_doubt, steps=row.steps)
    if row.time_ratio is None:
        return reading, Reading()
    return reading, Reading(value=row.time_ratio, spread=row.ratio_spread, doubt=row.ratio_doubt)


def peaks_by_source(row: Row) -> dict[str, float]:
    """Return peaks in bytes by the way they were measured, the memory instrument's first."""
    found: dict[str, float] = {}
    for instrument, peak in row.peaks.items():
        found.setdefault(str(row.measured[instrument].memory.get("source") or "stated"), peak)
    return found


def _memory(row: Row, source: str) -> tuple[Reading, Reading]:
    own, other = (peaks_by_source(each).get(source) if each else None for each in (row, row.standard))
    return Reading(value=own, source=source), Reading(value=own / other if own and other else None, source=source)


def _traffic(row: Row, source: str) -> tuple[Reading, Reading]:
    if not (traffic := traffic_of(row)):
        return Reading(), Reading()
    return Reading(value=traffic.dram_bytes, source=traffic.source), Reading(value=traffic.ratio, source=traffic.source)


TIME = Quantity(
    key="time",
    title="Step time",
    unit="ms",
    less="faster",
    more="slower",
    format=format_ms,
    judge=judge_by_spread,
    read=_time,
    rule=(
        "Faster or slower: the 10th to 90th percentiles of the two do not overlap, their medians differ by at least "
        f"{SMALLEST_TIME:.0%}, both were steady, and each had {FEWEST_STEPS} timed steps or more. The spread is that "
        "of steps within one run: two runs of the same program can differ by more, so look at standard too, or "
        "measure twice."
    ),
    how=(
        "A bar is the change of the median; the line across it spans what the 10th to 90th percentiles of the steps, "
        "before and now, allow. It does not see how much two runs of the same program differ."
    ),
)
MEMORY = Quantity(
    key="memory",
    title="Peak memory",
    unit="bytes",
    less="smaller",
    more="larger",
    format=format_bytes,
    judge=partial(judge_by_share, smallest=SMALLEST_COUNT),
    read=_memory,
    tally="in memory",
    noun=" peak memory",
    rule=f"Larger or smaller: by more than {SMALLEST_COUNT:.1%}. A peak is counted once, and repeats.",
    how=(
        "A bar is the change of a step's peak, counted once in each sweep and in the same way in both. It does not see "
        "what the peak is made of: each sweep's own page has that."
    ),
)
TRAFFIC = Quantity(
    key="traffic",
    title="DRAM bytes of a step",
    unit="bytes",
    less="fewer",
    more="more",
    format=format_traffic,
    judge=partial(judge_by_share, smallest=SMALLEST_TRAFFIC),
    read=_traffic,
    tally="bytes",
    noun=" DRAM bytes",
    rule=(
        f"More or fewer: by more than {SMALLEST_TRAFFIC:.0%}. Bytes are counted once; an estimate is only compared "
        "with an estimate."
    ),
)
QUANTITIES = (TIME, MEMORY, TRAFFIC)

"""What counts as a change of a figure between two sweeps.

Times have a spread, so a time changed only beyond it (`judge_by_spread`). Peak memory and bytes are counted once and
repeat, so they changed beyond a small share (`judge_by_share`). Readings of two sources are shown and never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dpscope.reports.doubt import FEW, FEWEST_STEPS, NO_SPREAD, REASONS, marked
from dpscope.reports.traffic.data import APPROXIMATELY
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
    """One figure of one row. A ratio's spread is the widest that those of its two rows allow."""

    value: float | None
    spread: tuple[float, float] | None = None  # 10th and 90th percentile
    doubt: str = ""  # what makes a time, or a ratio of times, doubtful
    steps: int | None = None  # that the spread is from
    source: str | None = None  # how it was measured


# Less (-1) or more (1) than before; otherwise the verdict in words: no change, or why nobody can say.
Judge = Callable[[Reading, Reading, float], "int | str"]


@dataclass(frozen=True)
class Figure:
    """What is compared, with the words for less and for more of it."""

    key: str
    title: str
    unit: str  # in the names of columns
    less: str
    more: str
    format: Callable[[float | None], str]
    judge: Judge


@dataclass(frozen=True)
class Change:
    """A figure before and now, and what can be said of the two."""

    figure: Figure
    before: Reading
    now: Reading

    @property
    def verdict(self) -> str:
        """The figure's word for less or more; or SAME, WITHIN, one of UNDECIDED, NO_FIGURES."""
        if self.before.value is None or self.now.value is None or self.before.value <= 0:
            return NO_FIGURES
        if self.before.source != self.now.source:
            return ANOTHER_SOURCE
        if self.before.value == self.now.value:
            return SAME
        found = self.figure.judge(self.before, self.now, self.now.value / self.before.value - 1)
        return found if isinstance(found, str) else self.figure.more if found > 0 else self.figure.less

    def show(self, reading: Reading) -> str:
        """With its unit; an estimate is marked as one, and so is what is doubtful."""
        mark = APPROXIMATELY if reading.source == ESTIMATE and reading.value is not None else ""
        return mark + marked(self.figure.format(reading.value), reading.doubt)

    @property
    def found(self) -> bool:
        return self.verdict in (self.figure.less, self.figure.more)

    @property
    def relative(self) -> float | None:
        """-0.2: a fifth less than before. None where the two cannot be compared."""
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
    """A change where the two spreads do not overlap, both were steady, and it is not too small to repeat."""
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


_by_count = partial(judge_by_share, smallest=SMALLEST_COUNT)
_by_traffic = partial(judge_by_share, smallest=SMALLEST_TRAFFIC)

# Each figure, and its ratio to standard of the same sweep.
TIME = Figure("time", "Time of a step", "ms", "faster", "slower", format_ms, judge_by_spread)
MEMORY = Figure("memory", "Peak memory", "bytes", "smaller", "larger", format_bytes, _by_count)
TRAFFIC = Figure("traffic", "DRAM bytes of a step", "bytes", "fewer", "more", format_traffic, _by_traffic)
RATIOS = {
    figure.key: Figure(
        f"{figure.key}_ratio", f"{figure.title} against standard", "", "lower", "higher", format_ratio, judge
    )
    for figure, judge in ((TIME, judge_by_spread), (MEMORY, _by_count), (TRAFFIC, _by_traffic))
}
FIGURES = (TIME, MEMORY, TRAFFIC)

RULES = {
    TIME.key: (
        "Faster or slower: the 10th to 90th percentiles of the two do not overlap, their medians differ by at least "
        f"{SMALLEST_TIME:.0%}, both were steady, and each had {FEWEST_STEPS} timed steps or more. The spread is that "
        "of steps within one run: two runs of the same program can differ by more, so look at standard too, or "
        "measure twice."
    ),
    MEMORY.key: f"Larger or smaller: by more than {SMALLEST_COUNT:.1%}. A peak is counted once, and repeats.",
    TRAFFIC.key: (
        f"More or fewer: by more than {SMALLEST_TRAFFIC:.0%}. Bytes are counted once; an estimate is only compared "
        "with an estimate."
    ),
}

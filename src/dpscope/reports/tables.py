"""A row of a comparison: one method on one workload at one size, with `standard` as the denominator.

Whether a figure is doubtful is decided here alone, for every table, chart, figure and export (docs/method.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from operator import attrgetter
from typing import Any, TypeVar

from dpscope.results.identity import StepNumbers, hashable, identity_of, machine_of, size_in_words
from dpscope.results.payloads.memory import CompilationPayload, MemoryPayload, TimingPayload
from dpscope.results.schema import Result
from dpscope.units import MIB, MISSING, format_ms, format_ratio, format_throughput, spread_of
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.settings import EAGERLY, LATER_DEFAULTS, REPEATS, SETTINGS
from dpscope.vocabulary.statuses import status_named

STEADY = 1.5  # a 90th percentile this many times the 10th: the machine was busy
FEWEST_STEPS = 5  # with fewer timed steps there is no spread to speak of, and no verdict
STRETCHED = 2.0  # a traced step this many times the unprofiled one is mostly the profiler

MARK = "?"
UNSTEADY, FEW, NO_SPREAD = REASONS = ("not steady", "too few steps", "spread unknown")

# What a note, a verdict that is not given, and a tooltip say of each.
EXPLAINED = {
    UNSTEADY: f"step times varied by more than {STEADY:g}× within a row",
    FEW: f"fewer than {FEWEST_STEPS} steps were timed",
    NO_SPREAD: "the spread of the steps is not known",
}
ADVICE = {
    UNSTEADY: "Close other programs, or raise --steps",
    FEW: f"Measure with --steps {FEWEST_STEPS} or more",
    NO_SPREAD: f"Measure again with --steps {FEWEST_STEPS} or more",
}


def doubt_of_times(spread: tuple[float, float] | None, steps: int | None) -> str:
    """Return one of `REASONS`, or an empty string. `spread`: 10th and 90th percentile; `steps`: number timed."""
    if spread is None:
        return NO_SPREAD
    if steps is not None and steps < FEWEST_STEPS:
        return FEW
    return UNSTEADY if spread[1] > STEADY * spread[0] else ""


def marked(text: str, doubt: str) -> str:
    """Return a figure as it is shown: with a `?` where it is doubtful."""
    return text + MARK if doubt and text != MISSING else text


def explain(doubts: Iterable[str]) -> str:
    """Return `? marks figures of times that …`, or nothing if there is no doubt."""
    found = set(doubts)
    reasons = [EXPLAINED[reason] for reason in REASONS if reason in found]
    return f"{MARK} marks a figure of time that is doubtful: {'; '.join(reasons)}." if reasons else ""


SIZES = ("batch_size", "seq_len")
SPEEDS = ("samples/s", "tokens/s")
BATCH_OF_A_RANK, BATCH_OF_A_STEP = "batch of a rank", "batch of a step"
Value = TypeVar("Value")
Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Row:
    """One method on one workload at one size: what every instrument saw of it, and its ratios to ordinary training."""

    measured: dict[str, Result]  # instrument -> result
    peak_instrument: str | None = None  # whose peak is shown; the same in every row of a comparison
    step_counts: StepNumbers = ()  # (warmup, steps) by name, where rows differ in them alone
    methods: tuple[str, ...] = ()  # all that the results hold: they are told apart by how they look
    reference: Row | None = field(default=None, repr=False)  # ordinary training of this size, if it is another row
    eager_standard: Row | None = field(default=None, repr=False)  # of a row that is compiled or a CUDA graph
    alone: Row | None = field(default=None, repr=False)  # the same method in one process, if this is of several
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # what `once_a_row` has computed

    @property
    def standard(self) -> Row | None:
        """Ordinary training of this size."""
        return self.reference or (self if self.method == STANDARD else None)

    @property
    def time_ratio(self) -> float | None:
        """Ratio of step times; the median of ratios if the row was timed in turns with ordinary training."""
        if self._ratios_in_turns and self.standard is not None:
            return statistics.median(self._ratios_in_turns)
        return _ratio(self, self.standard, attrgetter("median_ms"))

    @property
    def ratio_spread(self) -> tuple[float, float] | None:
        """10th and 90th percentile of the ratios, or how far the percentiles of both rows' times let them be apart."""
        own, other = self.spread_ms, self.standard.spread_ms if self.standard else None
        if self.standard is self:
            return 1.0, 1.0
        if self._ratios_in_turns:
            return spread_of(self._ratios_in_turns)
        return None if own is None or other is None or not other[0] else (own[0] / other[1], own[1] / other[0])

    @property
    def _ratios_in_turns(self) -> list[float]:
        in_turns = self.timing.get("in_turns")
        return in_turns["ratios"] if in_turns else []

    @property
    def memory_ratio(self) -> float | None:
        return _ratio(self, self.standard, attrgetter("peak_bytes"))

    @property
    def ratio_doubt(self) -> str:
        """Reason why the ratio of times is doubtful: this row's times, or standard's; the ratios taken in turns."""
        if self._ratios_in_turns:
            return doubt_of_times(self.ratio_spread, len(self._ratios_in_turns))
        return self._doubt_against(self.standard if self.median_ms is not None else None)

    @property
    def eager_time_ratio(self) -> float | None:
        """Ratio of a compiled or captured row to ordinary training that is neither."""
        return _ratio(self, self.eager_standard, attrgetter("median_ms"))

    @property
    def eager_memory_ratio(self) -> float | None:
        """Ratio of peaks to eager ordinary training, by the definition of a peak that both rows share."""
        return _ratio(
            *(self, self.eager_standard), lambda row: figure_of(row.memory.get("allocator_peak_bytes"), row.peak_bytes)
        )

    @property
    def eager_ratio_doubt(self) -> str:
        return self._doubt_against(self.eager_standard)

    def _doubt_against(self, other: Row | None) -> str:
        return self.time_doubt or (other.time_doubt if other else "")

    @property
    def eager_time_ratio_shown(self) -> str:
        return marked(format_ratio(self.eager_time_ratio), self.eager_ratio_doubt)

    @property
    def compilation(self) -> CompilationPayload | None:
        return self.timing.get("compilation")

    @property
    def result(self) -> Result:
        """Result that describes the row: one that failed, or else the first."""
        return next((result for result in self.measured.values() if not result.ok), self.first)

    @property
    def first(self) -> Result:
        return next(iter(self.measured.values()))

    @property
    def machine(self) -> str | None:
        return machine_of(self.first.environment)

    @property
    def looked_at(self) -> dict[str, Any]:
        """Spec whose numbers of steps are shown: that of the times."""
        return self.measured.get("time", self.first).spec

    @property
    def repeats(self) -> dict[str, Any]:
        return dict(self.step_counts) or {name: self.looked_at.get(name) for name in REPEATS}

    @property
    def method(self) -> str:
        return self.first.experiment

    @property
    def spec(self) -> dict[str, Any]:
        return self.first.spec

    @property
    def size(self) -> str:
        return size_in_words(self.spec)

    @property
    def where(self) -> str:
        """Size of the row, and `compiled` if it is: for headings."""
        return ", ".join(filter(None, (self.size, self.way)))

    @property
    def way(self) -> str:
        """How the step runs, if not eagerly: `compiled`, `CUDA graph`, or both."""
        names = (name for name, eager in EAGERLY.items() if self.field(name) != eager)
        return ", ".join(SETTINGS[name].in_words(self.spec) for name in names)

    @property
    def is_eager(self) -> bool:
        return not self.way

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that compared rows have in common; numbers of steps where rows differ in those."""
        return {**identity_of(self.spec), **dict(self.step_counts)}

    @cached_property
    def comparison(self) -> Hashable:
        """Key that is equal in rows which are compared with each other."""
        return hashable(self.identity)

    def field(self, name: str) -> Any:
        """Return the value in a column of this name: of the model, the method, the numbers of steps or the spec."""
        workload = self.spec["workload"]
        own = {"model": workload["name"], "method": self.method, **self.repeats}
        return {**LATER_DEFAULTS, **workload, **self.spec, **own}.get(name)

    def cell(self, name: str) -> str:
        """Return the same as a table shows it."""
        value = self.field(name)
        return SETTINGS[name].cell({name: value}) if name in SETTINGS else str(value or MISSING)

    def fields(self, *names: str) -> dict[str, Any]:
        return {name: self.field(name) for name in names}

    def why_none(self, unmeasured: str) -> str:
        """Return why the row has no figure of a kind: how it ended, or that it was not measured."""
        return unmeasured if self.result.ok else status_named(self.result.status).instead

    @property
    def ended_well(self) -> list[Result]:
        return [result for result in self.measured.values() if result.ok]

    def first_of(self, read: Callable[[Result], Value]) -> Value | None:
        """Return a value from the first successful measurement that has it; None if none does."""
        return next((found for result in self.ended_well if (found := read(result))), None)

    @property
    def timing(self) -> TimingPayload:
        return self.first_of(lambda result: result.timing) or TimingPayload()

    @property
    def median_ms(self) -> float | None:
        """Median step time; the mean if an older file has only that."""
        return figure_of(self.timing.get("median_ms"), *(result.avg_time_ms for result in self.ended_well))

    @property
    def spread_ms(self) -> tuple[float, float] | None:
        low, high = figure_of(self.timing.get("p10_ms")), figure_of(self.timing.get("p90_ms"))
        return None if low is None or high is None else (low, high)

    @property
    def steps(self) -> int | None:
        """How many steps were timed; None if a file does not say."""
        return len(self.timing["step_ms"]) if "step_ms" in self.timing else None

    @property
    def time_doubt(self) -> str:
        """Reason why this row's times are doubtful; empty if there is none, or no times."""
        return "" if self.median_ms is None else doubt_of_times(self.spread_ms, self.steps)

    @property
    def samples(self) -> int:
        """Samples of a step: those of all its batches."""
        return int(self.field("batch_size") * self.field("accumulate") * self.field("gpus"))

    @property
    def work(self) -> int:
        """Tokens of a step, or samples if there is no sequence."""
        return self.samples * (self.spec.get("seq_len") or 1)

    @property
    def time_shown(self) -> str:
        return marked(format_ms(self.median_ms), self.time_doubt)

    @property
    def time_ratio_shown(self) -> str:
        return marked(format_ratio(self.time_ratio), self.ratio_doubt)

    @property
    def speeds(self) -> dict[str, float]:
        """Known speeds, of `SPEEDS`: samples a second and, with a sequence, tokens a second."""
        if not self.median_ms:
            return {}
        samples, length = 1e3 * self.samples / self.median_ms, self.spec.get("seq_len")
        return {"samples/s": samples} | ({"tokens/s": samples * length} if length else {})

    def speed_shown(self, name: str) -> str:
        return marked(format_throughput(self.speeds.get(name)), self.time_doubt)

    @property
    def peaks(self) -> dict[str, float]:
        """Instrument -> the peak it gives, in bytes; the memory instrument first."""
        found: dict[str, float] = {}
        for name, result in sorted(self.measured.items(), key=lambda item: item[0] != "memory"):
            stated = figure_of(result.peak_memory_mb)
            peak = figure_of(result.memory.get("peak_bytes"), None if stated is None else stated * MIB)
            found |= {name: peak} if result.ok and peak is not None else {}
        return found

    @property
    def peak_bytes(self) -> float | None:
        return self.peaks.get(self.peak_instrument or next(iter(self.peaks), ""))

    @property
    def memory(self) -> MemoryPayload:
        """Memory payload that goes with the peak that is shown."""
        result = self.measured.get(self.peak_instrument or next(iter(self.peaks), ""))
        return result.memory if result is not None and result.ok else MemoryPayload()

    @property
    def peak_source(self) -> str:
        """How the peak that is shown was measured; empty if there is none, or the file does not say."""
        return self.memory.get("source", "") if self.peak_bytes is not None else ""

    @property
    def scaling(self) -> float | None:
        """Samples a second relative to the same method in one process; with n ranks, n would be perfect."""
        return _ratio(self, self.alone, lambda row: row.speeds.get("samples/s"))

    @property
    def scaling_batch(self) -> str:
        """The batch that the row of one process has in common with this row: a rank's, or a step's."""
        if self.alone is None:
            return ""
        return BATCH_OF_A_RANK if self.alone.field("batch_size") == self.field("batch_size") else BATCH_OF_A_STEP

    @property
    def notes(self) -> list[str]:
        """Notes worth knowing beside the figures, each sentence once."""
        return list(dict.fromkeys(note["sentence"] for result in self.measured.values() for note in result.notes))


def once_a_row(compute: Callable[[Row], Value]) -> Callable[[Row], Value]:
    """Return `compute` with its value kept for each row: text, page, figures and exports share it."""

    @wraps(compute)
    def kept(row: Row) -> Value:
        if compute not in row.derived:
            row.derived[compute] = compute(row)
        value: Value = row.derived[compute]
        return value

    return kept


def figure_of(*candidates: Any) -> float | None:
    """Return the first value that is a finite number of at least zero."""
    numbers = (value for value in candidates if isinstance(value, int | float) and not isinstance(value, bool))
    return next((value for value in numbers if math.isfinite(value) and value >= 0), None)


def _ratio(row: Row, other: Row | None, read: Callable[[Row], float | None]) -> float | None:
    """Return the ratio of a row's figure to another's; None if either is missing."""
    value, denominator = read(row), read(other) if other else None
    return value / denominator if value and denominator else None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items of the same key, in order of first appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_by_size(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows that are compared with each other."""
    return list(grouped(rows, attrgetter("comparison")).values())


def worth_a_column(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the fields that distinguish rows: always the method and the batch, never a missing sequence.

    Numbers of steps are included if rows differ in nothing else.
    """
    always = {"method", "batch_size", *(["seq_len"] if any(row.field("seq_len") for row in rows) else [])}
    never = {"seq_len", *(() if any(row.step_counts for row in rows) else REPEATS)}
    varying = {name for name in names if len({repr(row.field(name)) for row in rows}) > 1}
    return [name for name in names if name in always or name in varying - never]


def heading_of(name: str) -> str:
    """Return the heading of a field's column: `batch`, `seq`, `noise multiplier`."""
    return {"batch_size": "batch", "seq_len": "seq"}.get(name, name.replace("_", " "))

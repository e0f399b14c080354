"""Contents of a report, computed once and handed to text, page, figures and exports.

Results become rows first. A row has all measurements of one method at one size, next to ordinary training.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from dpscope.reports.looks import distinct
from dpscope.reports.story import Story, tell
from dpscope.reports.tables import SIZES, Row, group_by_size, grouped
from dpscope.results.identity import StepNumbers, hashable, identity_of, step_counts_of
from dpscope.results.schema import Result, with_paths_from
from dpscope.results.store import Skipped
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.settings import EAGERLY, LATER_DEFAULTS, SETTINGS


def compare_results(results: Iterable[Result]) -> list[Row]:
    """Return a row for each method at each size, in order of first appearance."""
    joined = join_instruments(list(results))
    # Peaks of two definitions are not compared: the instrument that gives most rows one, of equals the memory one.
    counts = Counter(name for row in joined for name in row.peaks)
    instrument = max(counts, key=lambda name: (counts[name], name == "memory"), default=None)
    methods = tuple(dict.fromkeys(row.method for row in joined))
    rows = [replace(row, peak_instrument=instrument, methods=methods) for row in joined]
    eager = {row.comparison: row for row in rows if row.method == STANDARD and row.is_eager}
    for place, row in enumerate(rows):
        if not row.is_eager:
            found = eager.get(hashable({**row.identity, **EAGERLY}))
            rows[place] = replace(row, eager_standard=found)
        elif row.field("gpus") > 1:
            rows[place] = replace(row, alone=_in_one_process(row, rows))
    standards = {row.comparison: row for row in rows if row.method == STANDARD}
    return [row if row is (found := standards.get(row.comparison)) else replace(row, reference=found) for row in rows]


def _in_one_process(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the single-process row of the same method with the batch of a rank or, failing that, of a step."""
    one = {**row.identity, **{name: LATER_DEFAULTS[name] for name in ("gpus", "parallel")}}
    batches = (row.field("batch_size"), row.field("batch_size") * row.field("gpus"))
    wanted = [hashable({**one, "batch_size": batch}) for batch in batches]
    found = {other.comparison: other for other in reversed(rows) if other.method == row.method}
    return next((found[each] for each in wanted if each in found), None)


def join_instruments(results: Sequence[Result]) -> list[Row]:
    """Join what was measured of the same method at the same size, in order of first appearance.

    Rows are separated by number of steps only if one instrument was run with several numbers. The result of an
    instrument with a single number then belongs to each of those rows.
    """
    counted: dict[tuple[Hashable, str, str], dict[StepNumbers, None]] = defaultdict(dict)  # of one method's results
    for result in results:
        key = (hashable(identity_of(result.spec)), result.instrument, result.experiment)
        counted[key][step_counts_of(result.spec)] = None
    several: dict[Hashable, dict[str, dict[StepNumbers, None]]] = defaultdict(lambda: defaultdict(dict))
    for (comparison, instrument, _), counts in counted.items():
        if len(counts) > 1:
            several[comparison][instrument] |= counts
    joined: dict[Hashable, list[Row]] = {}
    for result in results:
        comparison = hashable(identity_of(result.spec))
        repeated = several[comparison]
        every = dict.fromkeys(each for of_one in repeated.values() for each in of_one) or [()]
        for steps in [step_counts_of(result.spec)] if result.instrument in repeated else every:
            places = joined.setdefault((result.experiment, comparison, steps), [])
            row = next((row for row in places if result.instrument not in row.measured), None)
            if row is None:
                places.append(row := Row({}, step_counts=steps))
            row.measured[result.instrument] = result
    return [row for places in joined.values() for row in places]


UNLABELLED = ("name", *(name for name, each in SETTINGS.items() if each.speaks_for_itself))


@dataclass(frozen=True, eq=False)
class Report:
    results: tuple[Result, ...]
    skipped: tuple[Skipped, ...] = ()  # files among the results that are none
    folder: Path | None = None  # where it will lie: paths are told from there

    @classmethod
    def of(cls, results: Iterable[Result], skipped: Iterable[Skipped] = (), *, folder: Path | None = None) -> Report:
        found = tuple(result if folder is None else with_paths_from(folder, result) for result in results)
        return cls(found, tuple(skipped), folder)

    @cached_property
    def rows(self) -> list[Row]:
        return compare_results(self.results)

    @cached_property
    def settings(self) -> list[Setting]:
        return group_by_setting(self.rows)

    @cached_property
    def sizes(self) -> list[Size]:
        return [size for setting in self.settings for size in setting.sizes]

    @cached_property
    def stories(self) -> list[Story]:
        """Story of each of `sizes`."""
        return [tell(size.rows) for size in self.sizes]

    def rows_of(self, instrument: str) -> list[Row]:
        """Return the rows without those that repeat an earlier measurement of the instrument; for "", every row."""
        first = {id(row.measured[instrument]): row for row in reversed(self.rows) if instrument in row.measured}
        return [row for row in self.rows if instrument not in row.measured or row in first.values()]


@dataclass(frozen=True, eq=False)
class Size:
    """Rows that are compared with each other: one setting at one size."""

    setting: str
    rows: list[Row]

    @property
    def size(self) -> str:
        return self.rows[0].size

    @property
    def label(self) -> str:
        return f"{self.setting}: {self.size}" if self.setting else self.size


@dataclass(frozen=True)
class Setting:
    """Rows with the same model, number format, optimizer and so on: within it, a size names one comparison."""

    label: str  # what tells it from the other settings; "" where there is but one
    rows: list[Row]

    @property
    def sizes(self) -> list[Size]:
        return [Size(self.label, group) for group in group_by_size(self.rows)]


def group_by_setting(rows: Sequence[Row]) -> list[Setting]:
    """Group rows in order of first appearance. If rows differ in their number of steps, labels include it."""
    apart = any(row.step_counts for row in rows)
    first = {row.comparison: row for row in reversed(rows)}  # of the rows that are compared with each other

    def settings(row: Row) -> dict[str, Any]:
        """Return the settings of a row without its size, including the model's dimensions."""
        rest = {name: value for name, value in row.identity.items() if name not in (*SIZES, "workload")}
        return {**row.spec["workload"], **rest, **(first[row.comparison].repeats if apart else {})}

    groups = list(grouped(rows, lambda row: hashable(settings(row))).values())
    labels = _labels([settings(group[0]) for group in groups])
    return [Setting(label, group) for label, group in zip(labels, groups, strict=True)]


def _labels(described: Sequence[dict[str, Any]]) -> list[str]:
    """Return the shortest labels that distinguish the settings; numbers if no words do."""
    spoken = [name for name in _varying(described) if name in UNLABELLED]
    short = [_words(settings, spoken) for settings in described]
    labels = []
    for settings, words in zip(described, short, strict=True):
        alike = [other for other, others in zip(described, short, strict=True) if others == words]
        label = ", ".join(filter(None, (words, _words(settings, _varying(alike)))))
        labels.append(label if label or len(described) == 1 else "the rest")
    return distinct(labels)


def _varying(described: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for settings in described for name in settings)
    return [name for name in names if len({repr(settings.get(name)) for settings in described}) > 1]


def _words(settings: dict[str, Any], names: Sequence[str]) -> str:
    known = {name: settings[name] for name in names if not isinstance(settings.get(name), dict | list | NoneType)}
    return ", ".join(_say(name, value) for name, value in known.items())


def _say(name: str, value: Any) -> str:
    if name in SETTINGS:
        return SETTINGS[name].in_words({name: value})
    return str(value) if name in UNLABELLED else f"{name.replace('_', ' ')} {value}"

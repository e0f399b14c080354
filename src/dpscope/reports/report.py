"""Contents of a report, computed once and handed to text, page, figures and exports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from dpscope.reports.joining import compare_results
from dpscope.reports.story import Story, tell
from dpscope.reports.tables import SIZES, Row, group_by_size, grouped
from dpscope.reports.words import distinct
from dpscope.results.identity import hashable
from dpscope.results.schema import Result, with_paths_from
from dpscope.results.store import Skipped
from dpscope.vocabulary.settings import SETTINGS

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
        """One for each of `sizes`."""
        return [tell(size.rows) for size in self.sizes]

    def rows_of(self, instrument: str) -> list[Row]:
        """Return the rows without those that repeat what the instrument saw of an earlier one; "": every row."""
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
    """Rows with the same model, number format, optimizer and so on: here a size in words names one comparison."""

    label: str  # what tells it from the other settings; "" where there is but one
    rows: list[Row]

    @property
    def sizes(self) -> list[Size]:
        return [Size(self.label, group) for group in group_by_size(self.rows)]


def group_by_setting(rows: Sequence[Row]) -> list[Setting]:
    """Group rows in order of first appearance. If numbers of steps keep rows apart, all settings name theirs."""
    apart = any(row.step_counts for row in rows)
    first = {row.comparison: row for row in reversed(rows)}  # of the rows that are compared with each other

    def settings(row: Row) -> dict[str, Any]:
        """Return what a row is, without its size; the model's dimensions among it."""
        rest = {name: value for name, value in row.identity.items() if name not in (*SIZES, "workload")}
        return {**row.spec["workload"], **rest, **(first[row.comparison].repeats if apart else {})}

    groups = list(grouped(rows, lambda row: hashable(settings(row))).values())
    labels = _labels([settings(group[0]) for group in groups])
    return [Setting(label, group) for label, group in zip(labels, groups, strict=True)]


def _labels(described: Sequence[dict[str, Any]]) -> list[str]:
    """Return as few words as tell one from the other; a number if no words do. Of several each has a label."""
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

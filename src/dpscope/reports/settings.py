"""Which comparisons results hold: settings that differ in more than their size, and the sizes of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from dpscope.reports.tables import SIZES, Row, group_by_size, hashable
from dpscope.reports.words import distinct
from dpscope.vocabulary.settings import SETTINGS

UNLABELLED = ("name", *(name for name, each in SETTINGS.items() if each.speaks_for_itself))


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
    """In order of first appearance. Where numbers of steps keep rows apart, all settings name theirs."""
    apart = any(row.step_counts for row in rows)
    first = {row.comparison: row for row in reversed(rows)}  # of the rows that are compared with each other
    groups: dict[Hashable, list[Row]] = {}
    described: dict[Hashable, dict[str, Any]] = {}
    for row in rows:
        settings = {**_settings(row), **(first[row.comparison].repeats if apart else {})}
        groups.setdefault(hashable(settings), []).append(row)
        described[hashable(settings)] = settings
    labels = _labels(list(described.values()))
    return [Setting(label, group) for label, group in zip(labels, groups.values(), strict=True)]


def _settings(row: Row) -> dict[str, Any]:
    """What a row is, without its size; the model's dimensions among it."""
    rest = {name: value for name, value in row.identity.items() if name not in (*SIZES, "workload")}
    return {**row.spec["workload"], **rest}


def _labels(described: Sequence[dict[str, Any]]) -> list[str]:
    """As few words as tell one from the other; a number where no words do. Of several each has a label."""
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

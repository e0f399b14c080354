"""Which comparisons results hold: settings that differ in more than their size, and the sizes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from dpscope.reports.tables import MEASUREMENT_FIELDS, Row, group_by_size
from dpscope.reports.words import size_in_words
from dpscope.vocabulary.settings import LATER_DEFAULTS, SETTINGS

SIZES = ("batch_size", "seq_len")
NOT_A_SETTING = (*SIZES, *MEASUREMENT_FIELDS)
UNLABELLED = ("name", *(name for name, each in SETTINGS.items() if each.speaks_for_itself))


@dataclass(frozen=True)
class Setting:
    label: str  # what tells it from the other settings; "" where there is but one
    rows: list[Row]


@dataclass(frozen=True)
class Size:
    """Rows that are compared with each other: one setting at one size."""

    setting: str
    size: str
    rows: list[Row]

    @property
    def label(self) -> str:
        return f"{self.setting}: {self.size}" if self.setting else self.size


def group_by_setting(rows: Sequence[Row]) -> list[Setting]:
    """Rows with the same model, number format, optimizer and so on, in order of first appearance.

    Within a setting, a size in words names one comparison. Numbers of steps are a part of it only where they keep rows
    apart, and then of every row: those of the first row that it is compared with.
    """
    repeats: dict[tuple[Any, ...], dict[str, Any]] = {}
    if any(row.step_counts for row in rows):
        repeats = {group[0].size: group[0].repeats for group in group_by_size(rows)}
    groups: dict[str, list[Row]] = {}
    described: dict[str, dict[str, Any]] = {}
    for row in rows:
        settings = {**_settings(row), **repeats.get(row.size, {})}
        key = repr(sorted(settings.items()))
        groups.setdefault(key, []).append(row)
        described[key] = settings
    labels = _labels(list(described.values()))
    return [Setting(label, group) for label, group in zip(labels, groups.values(), strict=True)]


def sizes_of(setting: Setting) -> list[Size]:
    return [Size(setting.label, size_in_words(group[0].first.spec), group) for group in group_by_size(setting.rows)]


def _settings(row: Row) -> dict[str, Any]:
    """Everything of a spec that is neither size nor method, the model's dimensions among it."""
    spec = row.first.spec
    rest = {name: value for name, value in spec.items() if name not in (*NOT_A_SETTING, "workload")}
    return {**spec["workload"], **LATER_DEFAULTS, **rest}


def _labels(described: Sequence[dict[str, Any]]) -> list[str]:
    """As few words as tell one from the other; a number where no words do. Of several each has a label."""
    spoken = [name for name in _varying(described) if name in UNLABELLED]
    short = [_words(settings, spoken) for settings in described]
    labels = []
    for settings, words in zip(described, short, strict=True):
        alike = [other for other, others in zip(described, short, strict=True) if others == words]
        label = ", ".join(filter(None, (words, _words(settings, _varying(alike)))))
        labels.append(label if label or len(described) == 1 else "the rest")
    places = [labels[:place].count(label) for place, label in enumerate(labels)]
    return [f"{label} ({place + 1})" if place else label for label, place in zip(labels, places, strict=True)]


def _varying(described: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for settings in described for name in settings)
    return [name for name in names if len({repr(settings.get(name)) for settings in described}) > 1]


def _words(settings: dict[str, Any], names: Sequence[str]) -> str:
    known = {name: settings[name] for name in names if not isinstance(settings.get(name), dict | list | NoneType)}
    return ", ".join(_say(name, value) for name, value in known.items())


def _say(name: str, value: Any) -> str:
    if name in SETTINGS:
        return SETTINGS[name].in_words(value)
    return str(value) if name in UNLABELLED else f"{name.replace('_', ' ')} {value}"

"""Which comparisons a page holds: settings that differ in more than their size, and the sizes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from dpscope.reports.tables import Row, group_by_size
from dpscope.reports.words import size_in_words

SIZES = ("batch_size", "seq_len")
NOT_A_SETTING = (*SIZES, "method", "instrument", "options")
SPEAK_FOR_THEMSELVES = ("name", "dtype", "optimizer", "device")  # "bf16", not "dtype bf16"


@dataclass(frozen=True)
class Setting:
    label: str  # what tells it from the page's other settings; "" where there is but one
    rows: list[Row]


@dataclass(frozen=True)
class Size:
    """Rows that are compared with each other: one setting at one size."""

    setting: str
    size: str
    rows: list[Row]


def group_by_setting(rows: Sequence[Row]) -> list[Setting]:
    """Rows with the same model, number format, optimizer, steps and so on, in order of first appearance.

    Within a setting, a size in words names one comparison.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(sorted(_settings(row).items())), []).append(row)
    labels = _labels([_settings(group[0]) for group in groups.values()])
    return [Setting(label, group) for label, group in zip(labels, groups.values(), strict=True)]


def all_sizes(rows: Sequence[Row]) -> list[Size]:
    return [
        Size(setting.label, size_in_words(group[0].first.spec), group)
        for setting in group_by_setting(rows)
        for group in group_by_size(setting.rows)
    ]


def _settings(row: Row) -> dict[str, Any]:
    """Everything of a spec that is neither size nor method, the model's dimensions among it."""
    spec = row.first.spec
    rest = {name: value for name, value in spec.items() if name not in (*NOT_A_SETTING, "workload")}
    return {**spec["workload"], **rest}


def _labels(described: Sequence[dict[str, Any]]) -> list[str]:
    """As few words as tell one from the other; a number where no words do."""
    spoken = [name for name in _varying(described) if name in SPEAK_FOR_THEMSELVES]
    short = [_words(settings, spoken) for settings in described]
    labels = []
    for settings, words in zip(described, short, strict=True):
        alike = [other for other, others in zip(described, short, strict=True) if others == words]
        labels.append(", ".join(filter(None, (words, _words(settings, _varying(alike))))))
    places = [labels[:place].count(label) for place, label in enumerate(labels)]
    return [f"{label} ({place + 1})" if place else label for label, place in zip(labels, places, strict=True)]


def _varying(described: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for settings in described for name in settings)
    return [name for name in names if len({repr(settings.get(name)) for settings in described}) > 1]


def _words(settings: dict[str, Any], names: Sequence[str]) -> str:
    known = {name: settings[name] for name in names if not isinstance(settings.get(name), dict | list | NoneType)}
    words = (
        str(value) if name in SPEAK_FOR_THEMSELVES else f"{name.replace('_', ' ')} {value}"
        for name, value in known.items()
    )
    return ", ".join(words)

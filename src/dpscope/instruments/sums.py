"""Figures added up by key and returned as rows, the largest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

FigureRow = dict[str, Any]


class Sums:
    """Sums of named figures by key. With `steps`, rows hold averages over that many steps."""

    def __init__(self, *names: str, steps: int | None = None) -> None:
        self._names = names
        self._steps = steps
        self._sums: dict[Hashable, list[float]] = defaultdict(lambda: [0] * len(names))

    def add(self, key: Hashable, *values: float) -> None:
        sums = self._sums[key]
        for place, value in enumerate(values):
            sums[place] += value

    def rows(self, by: str, *keys: str) -> list[Any]:
        """Return a row for each key, with the parts of the key under the names of `keys`."""
        found = []
        for key, sums in self._sums.items():
            parts = key if isinstance(key, tuple) else (key,)
            values = sums if self._steps is None else [value / self._steps for value in sums]
            found.append({**dict(zip(keys, parts, strict=True)), **dict(zip(self._names, values, strict=True))})
        return sorted(found, key=lambda row: -row[by])


def shorten_rows(rows: list[Any], keys: Sequence[str], most: int, *, leave_out: Sequence[str] = ()) -> list[Any]:
    """Return the first `most` rows, and the rest added up as one, without the figures to `leave_out`."""
    if len(rows) <= most + 1:
        return rows
    shown, rest = rows[:most], rows[most:]
    merged: FigureRow = dict.fromkeys(keys, "") | {keys[0]: f"({len(rest)} others)"}
    figures = [name for name, value in rest[0].items() if isinstance(value, int | float) and name not in leave_out]
    return [*shown, merged | {name: sum(row[name] for row in rest) for name in figures}]

"""Modules that repeat, as one line: `blocks.0.up` to `blocks.19.up` are `blocks.*.up` where they cost alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cost = Mapping[str, float]  # of one module: parts -> bytes or milliseconds

ALIKE = 1.1  # times the cheapest: still the same, but for what a step happens to do first
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name
SUMS = re.compile(r"\((\d+ )?others?\)")  # what instruments call the modules that they do not list


@dataclass(frozen=True)
class Line:
    """`modules`: for each method those that the line stands for; none where its results do not list them."""

    name: str
    modules: list[dict[str, Cost]]

    @property
    def drawn(self) -> bool:
        return not SUMS.fullmatch(self.name)

    @property
    def named(self) -> bool:
        """Not `(outside the modules)`."""
        return not self.name.startswith("(")

    @property
    def heaviest(self) -> float:
        return max(total(cost) for modules in self.modules for cost in modules.values())


def total(cost: Cost) -> float:
    return sum(cost.values())


def fold(methods: Sequence[Mapping[str, Cost]]) -> list[Line]:
    """The heaviest first; of equals, in the order of the results."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for costs in methods for name in costs):
        families.setdefault(NUMBER.sub("*", name), []).append(name)
    lines = []
    for pattern, names in families.items():
        together = _line(pattern, names, methods)
        alike = len(names) > 1 and all(map(_alike, together.modules))
        lines += [together] if alike else [_line(name, [name], methods) for name in names]
    return sorted(lines, key=lambda line: -line.heaviest)


def _line(name: str, names: Sequence[str], methods: Sequence[Mapping[str, Cost]]) -> Line:
    return Line(name, [{each: costs[each] for each in names if each in costs} for costs in methods])


def _alike(modules: Mapping[str, Cost]) -> bool:
    totals = [total(cost) for cost in modules.values()]
    return not totals or max(totals) <= ALIKE * min(totals)

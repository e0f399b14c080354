"""Conditions on a comparison, for pipelines: `flash.time > 1.2`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpscope.errors import UserError
from dpscope.reports.tables import Row
from dpscope.units import GIB

# What can be asked of a method: ratios to ordinary training, or figures of its own.
FIGURES_OF_ROW: dict[str, Callable[[Row], float | None]] = {
    "time": lambda row: None if row.ratio_doubt else row.time_ratio,
    "memory": lambda row: row.memory_ratio,
    "ms": lambda row: None if row.time_doubt else row.median_ms,
    "gib": lambda row: None if row.peak_bytes is None else row.peak_bytes / GIB,
}
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_PATTERN = re.compile(r"\s*([\w-]+)\.(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*)\s*")


@dataclass(frozen=True)
class Condition:
    """`METHOD.FIGURE > NUMBER`; it holds where any row of the method has such a figure."""

    text: str
    method: str
    figure: str
    compare: Callable[[float, float], bool]
    number: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        found = _PATTERN.fullmatch(text)
        if found is None or found[2] not in FIGURES_OF_ROW:
            raise UserError(
                f"--fail-if {text!r} is no condition: write METHOD.FIGURE > NUMBER, as in 'flash.time > 1.2', with a "
                f"figure of {', '.join(FIGURES_OF_ROW)} (time and memory are ratios to standard)"
            )
        return cls(text.strip(), found[1], found[2], _COMPARE[found[3]], float(found[4]))

    def judge(self, rows: Sequence[Row]) -> str:
        """Return a sentence if it holds, or if the figure is missing; nothing otherwise."""
        own = [row for row in rows if row.method == self.method]
        known = [(row, value) for row in own if (value := FIGURES_OF_ROW[self.figure](row)) is not None]
        if len(known) < max(1, len(own)):
            return f"{self.text}: not known, because {self.method} has no undoubted {self.figure} in every row"
        held = [f"{value:.3g} at {row.size}" for row, value in known if self.compare(value, self.number)]
        return f"{self.text}: {self.figure} of {self.method} is {', '.join(held)}" if held else ""

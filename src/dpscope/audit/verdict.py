"""What an audit found, as plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

# A breach is proven. What held has held in so many trials and is not thereby proved. What was not tried has a reason.
HELD, BREACH, NOT_TRIED = "held", "BREACH", "not tried"


@dataclass(frozen=True)
class Finding:
    """The answer of one test.

    trials    how often it was tried
    unit      what one trial is
    figures   what was measured: by name, a number
    faults    sentences; none unless the verdict is a breach
    untried   what could not be tried, and why
    """

    verdict: str
    trials: int = 0
    unit: str = "trials"
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.verdict} in {self.trials} {self.unit}" if self.verdict == HELD else self.verdict


def conclude(
    faults: list[str], trials: int, unit: str, *, untried: list[str], figures: dict[str, float] | None = None
) -> Finding:
    verdict = BREACH if faults else HELD if trials else NOT_TRIED
    return Finding(verdict, trials, unit, figures or {}, faults, untried)


@dataclass(frozen=True)
class Audit:
    """Neighbouring batches, the noise, and the accountant of one loop."""

    neighbours: Finding
    noise: Finding
    accounting: Finding

    @property
    def breached(self) -> bool:
        return any(finding.verdict == BREACH for _, finding in self.findings())

    @property
    def ok(self) -> bool:
        """Neighbours and noise were tried, and nothing that was tried is a breach."""
        return not self.breached and NOT_TRIED not in (self.neighbours.verdict, self.noise.verdict)

    def findings(self) -> Iterator[tuple[str, Finding]]:
        return iter([("neighbours", self.neighbours), ("noise", self.noise), ("accounting", self.accounting)])

    def __str__(self) -> str:
        from dpscope.audit.text import describe_loop
        from dpscope.reports.text import render_plain

        return render_plain(describe_loop(self))

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        return as_json(self.to_dict())


def as_json(value: Any) -> str:
    """JSON knows neither inf nor NaN: what is not a number is written as null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same with null for every number that is not one."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

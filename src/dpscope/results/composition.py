"""Composition of a result's peak, in files of older scripts too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpscope.results.payloads.memory import Remainder
from dpscope.results.schema import Result
from dpscope.units import MIB
from dpscope.vocabulary.components import UNATTRIBUTED, in_order, sorted_components

TOTALS = ("total_allocated_mb", "peak_allocated_mb")  # in a breakdown, but no components


@dataclass(frozen=True)
class Composition:
    """A peak, component by component, in bytes. The components sum to the peak."""

    components: Mapping[str, float]
    phase: str | None = None
    operator: str | None = None
    module: str | None = None
    modules: list[tuple[str, dict[str, int]]] = field(default_factory=list)  # heaviest first
    unattributed: list[Remainder] = field(default_factory=list)  # what is known about the rest

    @property
    def total(self) -> float:
        return sum(self.components.values())

    def extra_over(self, other: Composition) -> dict[str, float]:
        """Return the bytes of each component beyond another's; below zero where this one holds less."""
        keys = in_order([*self.components, *other.components])
        return {key: self.components.get(key, 0.0) - other.components.get(key, 0.0) for key in keys}

    def ratio_to(self, standard: Composition | None) -> float | None:
        return self.total / standard.total if standard and standard.total > 0 else None

    @property
    def maker(self) -> str | None:
        """Operator that reached the peak: `backward: aten::bmm in blocks.3.up`."""
        what = " in ".join(filter(None, (self.operator, self.module)))
        return ": ".join(filter(None, (self.phase, what))) or None


def composition_in(result: Result) -> Composition | None:
    """Return what the peak was made of; None if the instrument did not see it."""
    peak = result.memory.get("peak")
    if peak and peak["components"]:
        modules = [(each["module"], sorted_components(each["components"])) for each in result.memory.get("modules", [])]
        return Composition(
            sorted_components(peak["components"]),
            *(peak["phase"] or None, peak["operator"] or None, peak["module"] or None),
            sorted(modules, key=lambda entry: -sum(entry[1].values())),
            result.memory.get("unattributed", []),
        )
    # From the `_mb` keys that older files have. What they leave open of the peak is unattributed.
    breakdown = result.breakdown
    parts = {key.removesuffix("_mb"): value * MIB for key, value in breakdown.items() if key not in TOTALS}
    total = MIB * (breakdown.get("peak_allocated_mb") or breakdown.get("total_allocated_mb") or 0.0)
    if parts and UNATTRIBUTED not in parts and total:
        parts[UNATTRIBUTED] = total - sum(parts.values())
    return Composition(sorted_components(parts)) if parts else None

"""A step's memory use: what was live when, and what the peak was made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from dpscope.instruments.memory.record import BEFORE_STEP, DIED, OUTSIDE_PHASES, RELEASED, Birth, Life, Record
from dpscope.results.payloads.memory import (
    OTHER_MODULES,
    ModuleAtPeak,
    TensorAtPeak,
    TensorsAtPeak,
    TimelinePayload,
    TimelinePhase,
)
from dpscope.results.timeline import thin

Belonging = tuple[str, str]  # a storage's component until autograd lets go of it for the last time, and after


def component_at(event: int, belonging: Belonging, released: int | None) -> str:
    before, after = belonging
    return before if released is None or event < released else after


OUTSIDE_MODULES = "(outside the modules)"  # the loss, the update, the batch


@dataclass(frozen=True)
class MemoryUse:
    """Live bytes of a step by component: `points[i]` after event i, in the order of `components`."""

    record: Record
    components: tuple[str, ...]
    points: list[tuple[int, ...]]
    belongings: list[Belonging]
    releases: list[int | None]

    @cached_property
    def totals(self) -> list[int]:
        return [sum(point) for point in self.points]

    @cached_property
    def peak(self) -> int:
        """The event after which most was live; the first of several."""
        return max(range(self.record.start, len(self.totals)), key=self.totals.__getitem__)

    @property
    def peak_bytes(self) -> int:
        return self.totals[self.peak]

    @property
    def peak_components(self) -> dict[str, int]:
        return dict(zip(self.components, self.points[self.peak], strict=True))

    @property
    def peak_birth(self) -> Birth | None:
        """The birth that made the peak; None if memory was highest at the start of the step."""
        birth = self.record.lives[self.record.events[self.peak][1]].birth
        return None if birth.operator == BEFORE_STEP else birth

    @cached_property
    def live_at_peak(self) -> list[tuple[Life, str, int]]:
        """Every storage that was live at the peak: (life, component, bytes)."""
        sizes: dict[int, int] = {}
        for kind, index, nbytes in self.record.events[: self.peak + 1]:
            if kind == DIED:
                del sizes[index]
            elif kind != RELEASED:
                sizes[index] = nbytes
        return [
            (self.record.lives[i], component_at(self.peak, self.belongings[i], self.releases[i]), nbytes)
            for i, nbytes in sizes.items()
        ]

    def modules_at_peak(self, limit: int = 1000) -> list[ModuleAtPeak]:
        """Return the bytes of the peak by module, the largest first; the rest as one row."""
        table: dict[str, dict[str, int]] = {}
        for life, component, nbytes in self.live_at_peak:
            row = table.setdefault(life.module or OUTSIDE_MODULES, {})
            row[component] = row.get(component, 0) + nbytes
        rows = sorted(table.items(), key=lambda item: -sum(item[1].values()))
        listed, rest = rows[:limit], rows[limit:]
        if rest:
            listed.append((OTHER_MODULES, {key: sum(row.get(key, 0) for _, row in rest) for key in self.components}))
        return [{"module": name, "components": {k: v for k, v in row.items() if v}} for name, row in listed]

    def tensors_at_peak(self, limit: int = 30) -> TensorsAtPeak:
        """Return the tensors at the peak: the largest first, equal ones of several layers as one row; then the rest.

        `bytes` is the size of one; they and the rest add up to the peak.
        """
        groups: dict[tuple[Any, ...], list[Life]] = {}
        for life, component, nbytes in self.live_at_peak:
            pattern = re.sub(r"\d+", "*", life.module)
            birth = life.birth
            kind = (birth.shape, birth.dtype, birth.phase, birth.operator, birth.line, birth.by_autograd)
            groups.setdefault((nbytes, component, pattern, *kind), []).append(life)
        ordered = sorted(groups.items(), key=lambda item: (-item[0][0], -len(item[1])))
        rest = [(key[0] * len(lives), len(lives)) for key, lives in ordered[limit:]]
        return {
            "largest": [_describe(key[0], key[1], key[2], lives) for key, lives in ordered[:limit]],
            "rest": {"bytes": sum(nbytes for nbytes, _ in rest), "count": sum(count for _, count in rest)},
        }

    def phases(self) -> list[TimelinePhase]:
        """Return the stretches of the timeline by innermost phase: a phase inside another interrupts it."""
        marks = [*self.record.marks, (len(self.record.events), OUTSIDE_PHASES)]
        first = self.record.start
        return [
            {"name": name, "start": start - first, "end": end - first}
            for (start, name), (end, _) in pairwise(marks)
            if name != OUTSIDE_PHASES and end > start
        ]

    def timeline(self, limit: int = 1500) -> TimelinePayload:
        """Return at most `limit` points: the peak, both sides of every phase's ends, and highs and lows in between."""
        first = self.record.start
        chosen = self._chosen(limit)
        return {
            "unit": "bytes",
            "event": "births, deaths and resizes of storages, autograd letting go of one; 0: the step begins",
            "components": list(self.components),
            "points": [[event - first, *self.points[event]] for event in chosen],
            "phases": self.phases(),
            "peak": chosen.index(self.peak),
        }

    def _chosen(self, limit: int) -> list[int]:
        first, end = self.record.start, len(self.points)
        edges = {at + side for phase in self.phases() for at in (phase["start"], phase["end"]) for side in (-1, 0)}
        kept = {0, end - first - 1, self.peak - first, *(edge for edge in edges if 0 <= edge < end - first)}
        return [first + event for event in thin(self.totals[first:], kept, limit)]


def _describe(nbytes: int, component: str, pattern: str, lives: Sequence[Life]) -> TensorAtPeak:
    birth, modules = lives[0].birth, {life.module for life in lives}
    return {
        "bytes": nbytes,
        "count": len(lives),
        "shape": list(birth.shape),
        "dtype": birth.dtype,
        "component": component,
        "module": modules.pop() if len(modules) == 1 else pattern,
        "phase": birth.phase if birth.operator != BEFORE_STEP else "",
        "operator": birth.operator,
        "line": "" if birth.line is None else str(birth.line),
        "by_autograd": birth.by_autograd,
    }

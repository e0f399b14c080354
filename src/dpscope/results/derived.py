"""Conclusions from one result: how bytes came and went, what the peak was made of, whether it adds up; its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from dpscope.results.payloads.memory import Link, Remainder, TensorAtPeak, TimelinePayload
from dpscope.results.schema import Result
from dpscope.units import MIB, MISSING
from dpscope.vocabulary.components import UNATTRIBUTED, in_order, sorted_components
from dpscope.vocabulary.phases import BETWEEN_PHASES
from dpscope.vocabulary.settings import SETTINGS


class PhaseSpan(NamedTuple):
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes of each component after every event of one step."""

    events: list[int]
    levels: dict[str, list[int]]  # component -> bytes, one for each event
    phases: list[PhaseSpan]

    @cached_property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.levels.values(), strict=True)]

    @property
    def highest(self) -> dict[str, int]:
        """The most that each component holds."""
        return {key: max(level) for key, level in self.levels.items()}

    @cached_property
    def peak(self) -> int:
        """The index of the first event with the most live bytes."""
        return self.totals.index(max(self.totals))

    def is_in(self, phase: PhaseSpan, event: int) -> bool:
        """Return the phase of each event. An event between two phases belongs to the later one."""
        return phase.start <= event and (event < phase.end or phase.end == self.events[-1])

    def phase_at(self, event: int) -> str | None:
        """Return the innermost phase at a moment: `clip` inside `backward` is `clip`. None between phases."""
        inside = [phase for phase in self.phases if self.is_in(phase, event)]
        return min(inside, key=lambda phase: phase.end - phase.start).name if inside else None

    @property
    def peak_phase(self) -> str | None:
        return self.phase_at(self.events[self.peak])

    @property
    def stretches(self) -> list[PhaseSpan]:
        """Phases of the whole step, with named stretches before, between and after them."""
        whole: list[PhaseSpan] = []
        reached, end = self.events[0], self.events[-1]
        for phase in [*self.phases, PhaseSpan("", end, end)]:
            whole += [PhaseSpan(BETWEEN_PHASES, reached, phase.start)] if phase.start > reached else []
            whole += [phase] if phase.name else []
            reached = max(reached, phase.end)
        return whole

    def moments(self, most: int) -> list[int]:
        """Return the indices of at most about `most` events to draw.

        These are the ends, every component's maximum, the borders of phases, and the highest and lowest total of each
        stretch: the peak is one of them.
        """
        count = len(self.events)
        kept = {0, count - 1, *(level.index(max(level)) for level in self.levels.values())}
        for edge in (edge for phase in self.phases for edge in (phase.start, phase.end)):
            kept.add(max((n for n, event in enumerate(self.events) if event <= edge), default=0))
            kept.add(next((n for n, event in enumerate(self.events) if event >= edge), count - 1))
        return thin(self.totals, kept, most)


def timeline_in(payload: TimelinePayload) -> Timeline | None:
    """Return the timeline of a result; None if there is none that can be drawn."""
    keys, points = payload.get("components"), payload.get("points", [])
    if not keys or len(points) < 2 or any(len(point) != len(keys) + 1 for point in points):
        return None
    events, *levels = (list(column) for column in zip(*points, strict=True))
    if any(later < earlier for earlier, later in pairwise(events)):
        return None
    first, last = events[0], events[-1]
    phases = [PhaseSpan(p["name"], max(p["start"], first), min(p["end"], last)) for p in payload.get("phases", [])]
    known = sorted((phase for phase in phases if phase.end >= phase.start), key=lambda phase: phase.start)
    return Timeline(events, sorted_components(dict(zip(keys, levels, strict=True))), known)


def thin(totals: Sequence[int], kept: Iterable[int], most: int) -> list[int]:
    """Return the indices of about `most` events: those of `kept`, and the highest and lowest total of each stretch."""
    chosen, count = set(kept), len(totals)
    if count <= most:
        return list(range(count))
    stretches = max((most - len(chosen)) // 2, 1)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        chosen |= {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(chosen)


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


def shape_in_words(tensor: TensorAtPeak) -> str:
    """Return `8×1024 float32`."""
    return f"{'×'.join(map(str, tensor['shape'])) or 'scalar'} {tensor['dtype']}"


def maker_of(tensor: TensorAtPeak) -> str:
    """Return module and operator; a tensor from before the step has only its module."""
    return " · ".join(filter(None, (tensor["module"], tensor["operator"].removeprefix("aten::")))) or MISSING


def place_of(tensor: TensorAtPeak, *, short: bool = False) -> str:
    """Return the line of code, and `backward` if autograd made the tensor; `short`: `model.py:12, backward`."""
    line, by_autograd = tensor["line"], tensor["by_autograd"]
    if not tensor["operator"]:
        return "before the step"
    if not line:
        return "autograd" if by_autograd else MISSING
    if short:
        return line.partition(" ")[0].rpartition("/")[2] + (", backward" if by_autograd else "")
    return f"backward of {line}" if by_autograd else line


class NotConserved(AssertionError):
    """Error for bytes that were counted twice or lost: the figures of the result are invalid."""


def require_conserved(points: Sequence[Sequence[int]], totals: Sequence[int]) -> None:
    """Raise unless the components add up to the live total at every point, and none is negative."""
    if len(points) != len(totals):
        raise NotConserved(f"{len(points)} points of components, {len(totals)} totals")
    for event, (point, total) in enumerate(zip(points, totals, strict=True)):
        if sum(point) != total or min(point) < 0:
            raise NotConserved(f"event {event}: components {list(point)} do not add up to {total} live bytes")


def conservation_faults(result: Result) -> list[str]:
    """Return a sentence for each sum that does not add up in a memory result; empty if all do."""
    memory, timeline = result.memory, result.timeline
    parts = memory["peak"]["components"]
    tracked = sum(amount for key, amount in parts.items() if key != "unattributed")
    by_module = sum(sum(row["components"].values()) for row in memory["modules"])
    tensors = memory["tensors"]
    by_tensor = sum(each["bytes"] * each["count"] for each in tensors["largest"]) + tensors["rest"]["bytes"]
    explained = sum(item["bytes"] for item in memory["unattributed"])
    breakdown = sum(value for key, value in result.breakdown.items() if key.removesuffix("_mb") in parts)
    drawn = sum(timeline["points"][timeline["peak"]][1:])
    highest = max(sum(point[1:]) for point in timeline["points"])
    claims = (
        ("components at the peak and the peak", sum(parts.values()), memory["peak_bytes"]),
        ("tracked components and the tracked peak", tracked, memory["tracked_peak_bytes"]),
        ("modules at the peak and the tracked peak", by_module, memory["tracked_peak_bytes"]),
        ("tensors at the peak and the tracked peak", by_tensor, memory["tracked_peak_bytes"]),
        ("the timeline's peak and the tracked peak", drawn, memory["tracked_peak_bytes"]),
        ("the timeline's highest point and the tracked peak", highest, memory["tracked_peak_bytes"]),
        ("what explains unattributed and unattributed", explained, parts["unattributed"]),
        ("breakdown and peak, rounded to bytes", round(breakdown * 2**20), memory["peak_bytes"]),
    )
    return [f"{what}: {left} against {right} bytes" for what, left, right in claims if left != right]


COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")  # in the order of columns; others after them


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """Figures by rank. A simulated world has one rank and a computed sending time."""

    world_size: int
    simulated: bool
    slowest: int  # which rank
    largest: int  # the rank with the highest peak
    peaks: list[int]  # in bytes, by rank
    bytes: dict[str, int]  # collective -> bytes of its larger side, in a step of one rank
    collective_bytes: int  # of all of them
    sent_bytes: int
    share: float | None  # of a profiled step: a collective is under way, on the rank that waits least
    link: Link | None  # in a simulated world: the computed sending time of a rank

    def with_sending(self, step_ms: float | None) -> tuple[float, float] | None:
        """Return the time of a simulated step if communication is fully hidden, and if none of it is."""
        if self.link is None or step_ms is None:
            return None
        return max(step_ms, self.link["send_ms"]), step_ms + self.link["send_ms"]


def ranks_in(result: Result) -> RankCosts | None:
    """Return the costs of a result's ranks; None if it is of one process."""
    ranks = result.ranks
    if not ranks or not ranks["time_ms"] or not ranks["peak_bytes"]:
        return None
    times, peaks, found = ranks["time_ms"], ranks["peak_bytes"], ranks["collectives"]
    names = [name for name in COLLECTIVES if name in found]
    return RankCosts(
        world_size=SETTINGS["simulate_world" if ranks["simulated"] else "gpus"].of(result.spec),
        simulated=ranks["simulated"],
        slowest=times.index(max(times)),
        largest=peaks.index(max(peaks)),
        peaks=peaks,
        bytes={name: found[name]["bytes"] for name in [*names, *sorted(set(found) - set(names))]},
        collective_bytes=sum(each["bytes"] for each in found.values()),
        sent_bytes=sum(each["sent_bytes"] for each in found.values()),
        share=min(ranks.get("collective_share") or [], default=None),
        link=ranks.get("link"),
    )

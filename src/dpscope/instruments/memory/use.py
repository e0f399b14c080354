"""A step's memory use: what was live when, and what the peak was made of.

Each storage of a record belongs to exactly one component at every instant. docs/memory.md has the order of the rules.
A storage changes its component at most once: when autograd frees it and it lives on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpscope.errors import UserError
from dpscope.instruments.memory.record import BEFORE_STEP, DIED, OUTSIDE_PHASES, RELEASED, Birth, Life, Record
from dpscope.instruments.memory.tracker import Holding
from dpscope.results.derived import require_conserved, thin
from dpscope.results.payloads import memory as payload
from dpscope.vocabulary.components import (
    ACTIVATION_HOOKS,
    ACTIVATIONS,
    GRADIENTS,
    KEYS,
    MODEL_PARAMETERS,
    OPTIMIZER_STATES,
    TEMP_MATRICES,
    UNATTRIBUTED,
)
from dpscope.vocabulary.phases import component_of

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
        """The event after which the most bytes were live; the first if there are several."""
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

    def modules_at_peak(self, limit: int = 1000) -> list[payload.ModuleAtPeak]:
        """Return the bytes of the peak by module, the largest first; the rest as one row."""
        table: dict[str, dict[str, int]] = {}
        for life, component, nbytes in self.live_at_peak:
            row = table.setdefault(life.module or OUTSIDE_MODULES, {})
            row[component] = row.get(component, 0) + nbytes
        rows = sorted(table.items(), key=lambda item: -sum(item[1].values()))
        listed, rest = rows[:limit], rows[limit:]
        if rest:
            others = {key: sum(row.get(key, 0) for _, row in rest) for key in self.components}
            listed.append((payload.OTHER_MODULES, others))
        return [{"module": name, "components": {k: v for k, v in row.items() if v}} for name, row in listed]

    def tensors_at_peak(self, limit: int = 30) -> payload.TensorsAtPeak:
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

    def phases(self) -> list[payload.TimelinePhase]:
        """Return the stretches of the timeline by innermost phase: a phase inside another interrupts it."""
        marks = [*self.record.marks, (len(self.record.events), OUTSIDE_PHASES)]
        first = self.record.start
        return [
            {"name": name, "start": start - first, "end": end - first}
            for (start, name), (end, _) in pairwise(marks)
            if name != OUTSIDE_PHASES and end > start
        ]

    def timeline(self, limit: int = 1500) -> payload.TimelinePayload:
        """Return at most `limit` points: the peak, both sides of every phase's ends, and highs and lows in between."""
        first, end = self.record.start, len(self.points)
        edges = {at + side for phase in self.phases() for at in (phase["start"], phase["end"]) for side in (-1, 0)}
        kept = {0, end - first - 1, self.peak - first, *(edge for edge in edges if 0 <= edge < end - first)}
        chosen = [first + event for event in thin(self.totals[first:], kept, limit)]
        return {
            "unit": "bytes",
            "event": "births, deaths and resizes of storages, autograd letting go of one; 0: the step begins",
            "components": list(self.components),
            "points": [[event - first, *self.points[event]] for event in chosen],
            "phases": self.phases(),
            "peak": chosen.index(self.peak),
        }


def _describe(nbytes: int, component: str, pattern: str, lives: Sequence[Life]) -> payload.TensorAtPeak:
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


ComponentRule = Callable[[Birth], str | None]


def attribute(record: Record, rules: Iterable[ComponentRule] = ()) -> MemoryUse:
    """Attribute every byte of the record to a component. Raise if the components do not add up to the live total."""
    asked = tuple(rules)
    belongings = [_belonging(life, asked) for life in record.lives]
    new = {name for belonging in belongings for name in belonging} - set(KEYS)
    components = (*(key for key in KEYS if key != UNATTRIBUTED), *sorted(new))
    releases = record.last_releases()
    points = _points(record, belongings, releases, components)
    require_conserved(points, record.totals())
    return MemoryUse(record, components, points, belongings, releases)


def _belonging(life: Life, rules: Sequence[ComponentRule]) -> Belonging:
    if life.birth.operator != BEFORE_STEP:
        for rule in rules:
            name = rule(life.birth)
            if name is None:
                continue
            if not isinstance(name, str) or not name.isidentifier() or name == UNATTRIBUTED:
                known = ", ".join(key for key in KEYS if key != UNATTRIBUTED)
                raise UserError(
                    f"the component rule {getattr(rule, '__name__', rule)!r} returned {name!r}: return None, one of "
                    f"{known}, or a new name in lower_case_letters"
                )
            return name, name
        declared = component_of(life.birth.function, life.birth.operator)
        if declared is not None:
            return declared, declared
    if life.owner is not None:
        return life.owner, life.owner
    if life.birth.recomputed:
        return ACTIVATIONS, ACTIVATIONS
    beyond = ACTIVATION_HOOKS if life.kept else TEMP_MATRICES
    return (ACTIVATIONS if life.was_saved else beyond), beyond


def _points(
    record: Record, belongings: Sequence[Belonging], releases: Sequence[int | None], components: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the live bytes of each component after each event."""
    place = {name: index for index, name in enumerate(components)}
    amounts = [0] * len(components)
    held: list[tuple[int, int]] = [(0, 0)] * len(record.lives)  # (place, bytes) of each storage now
    points = []
    for event, (kind, index, nbytes) in enumerate(record.events):
        where, size = held[index]
        amounts[where] -= size
        where = place[component_at(event, belongings[index], releases[index])]
        size = 0 if kind == DIED else size if kind == RELEASED else nbytes
        amounts[where] += size
        held[index] = where, size
        points.append(tuple(amounts))
    return points


def model_holdings(model: nn.Module, optimizer: Optimizer) -> Iterator[Holding]:
    """Yield (component, module, tensor) for parameters, buffers, `.grad` and optimizer state as they are now."""
    for name, buffer in model.named_buffers():
        yield MODEL_PARAMETERS, name.rpartition(".")[0], buffer
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        yield MODEL_PARAMETERS, module, parameter
        if parameter.grad is not None:
            yield GRADIENTS, module, parameter.grad
        for leaf in tree_leaves(optimizer.state.get(parameter, {})):
            if isinstance(leaf, Tensor):
                yield OPTIMIZER_STATES, module, leaf

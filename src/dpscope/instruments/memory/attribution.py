"""Attribution of a record: each storage belongs to exactly one component at every instant.

docs/memory.md has the order of the rules. A storage changes its component at most once: when autograd frees it and it
lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dpscope.errors import UserError
from dpscope.instruments.memory.record import BEFORE_STEP, DIED, RELEASED, Birth, Life, Record
from dpscope.instruments.memory.use import Belonging, MemoryUse, component_at
from dpscope.results.checks import require_conserved
from dpscope.vocabulary.allocations import component_of
from dpscope.vocabulary.components import ACTIVATION_HOOKS, ACTIVATIONS, KEYS, TEMP_MATRICES, UNATTRIBUTED

ComponentRule = Callable[[Birth], str | None]


def attribute(record: Record, rules: Iterable[ComponentRule] = ()) -> MemoryUse:
    """Attribute every byte of the record to a component. Raise if they do not add up to the live total at an event."""
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
            if name is not None:
                return (_checked(name, rule),) * 2
        declared = component_of(life.birth.function, life.birth.operator)
        if declared is not None:
            return declared, declared
    if life.owner is not None:
        return life.owner, life.owner
    if life.birth.recomputed:
        return ACTIVATIONS, ACTIVATIONS
    beyond = ACTIVATION_HOOKS if life.kept else TEMP_MATRICES
    return (ACTIVATIONS if life.was_saved else beyond), beyond


def _checked(name: object, rule: ComponentRule) -> str:
    if not isinstance(name, str) or not name.isidentifier() or name == UNATTRIBUTED:
        known = ", ".join(key for key in KEYS if key != UNATTRIBUTED)
        raise UserError(
            f"the component rule {getattr(rule, '__name__', rule)!r} returned {name!r}: return None, one of {known}, "
            "or a new name in lower_case_letters"
        )
    return name


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

"""Numbers among the arguments of a model that are that of its samples: `model(x, len(x))`.

Such a number follows the rows that are tried. A number may also be as large by chance: heads, classes, positions. It is
not that of the samples if it was another one in any call of the same form. It surely is if it was the same in batches
of two sizes, unless the model cannot run when it follows the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from dpscope.flash.torch_side.arguments import ArgumentPlace, ModelCall, numbers_in

MOST_TRIED = 4
"""Numbers of which all combinations are tried."""


class Told(NamedTuple):
    """Places of numbers that are as large as the batch, and those that surely are the number of samples."""

    maybe: frozenset[ArgumentPlace]
    surely: frozenset[ArgumentPlace]

    def readings(self) -> Iterator[frozenset[ArgumentPlace]]:
        """Yield sets of the numbers that may be told, to be tried in turn: those with all sure ones come first."""
        places = sorted(self.maybe, key=repr)
        counts = range(len(places), -1, -1)
        few = [n for n in counts if len(places) <= MOST_TRIED or n in (0, 1, len(places) - 1, len(places))]
        found = [frozenset(some) for n in few for some in combinations(places, n)]
        yield from sorted(found, key=lambda some: not self.surely <= some)


class ToldNumbers:
    """Evidence that calls give of their numbers, by the form of a call and the place in it."""

    def __init__(self) -> None:
        self._sizes: dict[Any, set[int]] = {}  # of batches that were as large as the number
        self._others: set[Any] = set()  # numbers that were another one, or cannot follow the rows
        self._found: dict[Any, frozenset[ArgumentPlace]] = {}  # by form, what verification has found last

    def look(self, call: ModelCall, batch: int) -> Told:
        """Note the numbers of a call."""
        numbers = dict(numbers_in(call))
        form = tuple(numbers)
        for place, number in numbers.items():
            if number != batch:
                self._others.add((form, place))
            elif batch:
                self._sizes.setdefault((form, place), set()).add(batch)
        maybe = {place for place in numbers if numbers[place] == batch and (form, place) not in self._others}
        return Told(
            frozenset(maybe), frozenset(place for place in maybe if len(self._sizes.get((form, place), ())) > 1)
        )

    def found(self, call: ModelCall, told: Told, those: frozenset[ArgumentPlace]) -> None:
        """Note which numbers verification has found to be told."""
        form = tuple(dict(numbers_in(call)))
        self._found[form] = those
        self._others.update((form, place) for place in told.surely - those)

    def in_empty(self, call: ModelCall) -> frozenset[ArgumentPlace]:
        """Return the numbers of an empty batch that are told, as far as that is known, or that may be."""
        numbers = dict(numbers_in(call))
        return self._found.get(tuple(numbers)) or self.look(call, 0).maybe

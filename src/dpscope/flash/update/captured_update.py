"""The update of a step inside a CUDA graph, and the optimizer's step counters, whose values are known on the host.

What the host decides reaches a graph through device memory.

torch keeps a counter for each parameter, perhaps on the device. Adding one to hundreds of tensors of one element costs
the host more than any other part of a step, so the counters of a launch are put into one storage: each stays the tensor
that it was, as an element of a longer one, and one addition advances them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpscope.flash.kernels.tensor_lists import words_of

_VERSION = attrgetter("_version")


class _Counted(NamedTuple):
    """Counters that were advanced together, what was seen of them since, and their value."""

    counters: list[Tensor]
    versions: list[int]
    pointers: list[int]
    value: int
    together: Tensor | None  # the tensor whose elements they are

    def is_of(self, counters: list[Tensor]) -> bool:
        return len(self.counters) == len(counters) and all(map(is_, self.counters, counters))


class StepCounts:
    """Counts along with torch's counters. A counter that other code changed, moved or replaced is read again."""

    def __init__(self) -> None:
        self._known: list[_Counted] = []
        self._advanced: list[_Counted] = []

    def begin_step(self) -> None:
        self._known, self._advanced = self._advanced or self._known, []

    def next_values(self, counters: list[Tensor]) -> Sequence[int]:
        """Return the number of this step for each counter, counted from 1."""
        versions, pointers = list(map(_VERSION, counters)), list(map(Tensor.data_ptr, counters))
        for counted in self._known:
            if counted.versions == versions and counted.pointers == pointers and counted.is_of(counters):  # as a rule
                return [counted.value + 1] * len(counters)
        known = {
            (id(counter), version, pointer): counted.value
            for counted in self._known
            for counter, version, pointer in zip(counted.counters, counted.versions, counted.pointers, strict=True)
        }
        seen = zip(map(id, counters), versions, pointers, strict=True)
        return [(known[key] if key in known else int(counter)) + 1 for counter, key in zip(counters, seen, strict=True)]

    def read(self, counters: list[Tensor]) -> None:
        """Read counters that are not known, so that `next_values` waits for no device, as a CUDA graph demands."""
        self.begin_step()
        values = [value - 1 for value in self.next_values(counters)]
        for value in set(values):
            alike = [counter for counter, each in zip(counters, values, strict=True) if each == value]
            seen = list(map(_VERSION, alike)), list(map(Tensor.data_ptr, alike))
            self._known.append(_Counted(alike, *seen, value, None))

    def advance(self, counters: list[Tensor], value: int) -> None:
        """Add one to counters, which then hold `value`."""
        pointers = list(map(Tensor.data_ptr, counters))
        together = self._together(counters, pointers)
        if together is None:
            torch._foreach_add_(counters, 1)
        else:
            together.add_(1)
            torch.autograd.graph.increment_version(counters)  # as an addition to each of them would
        self._advanced.append(_Counted(counters, list(map(_VERSION, counters)), pointers, value, together))

    def _together(self, counters: list[Tensor], pointers: list[int]) -> Tensor | None:
        """Return the tensor whose elements are exactly these counters, or None. `pointers` become their addresses."""
        for counted in self._known:
            if counted.together is not None and counted.pointers == pointers and counted.is_of(counters):
                return counted.together
        elsewhere = {id(each) for counted in self._known if counted.together is not None for each in counted.counters}
        # Where the parameters of a launch change from step to step, putting counters together anew does not pay.
        together = None if any(id(each) in elsewhere for each in counters) else _put_together(counters)
        pointers[:] = map(Tensor.data_ptr, counters)
        return together


def _put_together(counters: list[Tensor]) -> Tensor | None:
    """Copy the counters into one tensor and make them its elements; None if they are not alike."""
    kinds = {(type(each), each.dim(), each.dtype, each.device, each.is_inference()) for each in counters}
    kind, dim, *_, inference = kinds.pop()
    if kinds or kind is not Tensor or dim or inference or len(set(map(id, counters))) < len(counters):
        return None
    together = torch.stack(counters)
    for counter, element in zip(counters, together.unbind(0), strict=True):
        counter.data = element
    return together


Numbers = Callable[[int, dict[str, Any]], list[float]]  # of a step's number and its privacy: what a kernel reads

SPENT = -1
"""Word of a key that was used. Read as a number it is NaN."""
LONGEST = 16
"""Words of a row, at most: a key and the numbers of a kernel."""


@dataclass
class _Row:
    """Key and numbers of the launches of one group of parameters that have taken equally many steps."""

    words: Tensor
    numbers: Numbers
    counters: list[list[Tensor]] = field(default_factory=list)  # of each launch


class CapturedUpdate:
    """Launches of an update in a graph, made before it is captured. Each reads key and numbers from a row.

    Guarantee: no two replays add the same noise. The graph ends by overwriting the rows (`spend`), so each replay needs
    a `fill` of its own, which takes a key. Without one every parameter would become NaN.
    """

    def __init__(self, optimizer: Optimizer, counts: StepCounts, device: torch.device) -> None:
        self._optimizer, self._counts = optimizer, counts
        most = 8 * len(optimizer.param_groups)  # parameters of one group seldom have taken different numbers of steps
        self._words = torch.full((most, LONGEST), SPENT, dtype=torch.int64, device=device)
        self._rows: list[_Row] = []
        self._places: dict[tuple[int, int], int] = {}  # (id of a group, step's number in the capture) -> its row
        self._parameters: list[Tensor] = []
        self._before = state_of(optimizer)  # none is made in a graph, which would make it anew in each replay

    def add(
        self, group: dict[str, Any], step: int, numbers: Numbers, parameters: Sequence[Tensor], *counters: Tensor
    ) -> Tensor:
        """Note a launch while the graph is captured. Return the row that it reads."""
        place = self._places.setdefault((id(group), step), len(self._places))
        if place == len(self._rows):
            length = len(words_of((0, 0), numbers(step, {"noise_std": 0.0, "grad_scale": 1.0})))
            self._rows.append(_Row(self._words[place, :length], numbers))
        found = self._rows[place]
        found.counters.append(list(counters))
        self._parameters += parameters
        return found.words

    def spend(self) -> None:
        """Overwrite the rows, as the last work of the graph."""
        self._words.fill_(SPENT)

    def fits(self) -> bool:
        """Return whether the optimizer's options and state are those of the capture, but for numbers."""
        return self._before == state_of(self._optimizer) and None not in self._steps()

    def _steps(self) -> list[int | None]:
        """Return the next step's number of each row; None if its parameters have taken different numbers of steps."""
        self._counts.begin_step()
        found = []
        for row in self._rows:
            values = set(chain.from_iterable(map(self._counts.next_values, filter(None, row.counters))))
            found.append(None if len(values) > 1 else values.pop() if values else 1)
        return found

    def fill(self, key: tuple[int, int], privacy: dict[str, float]) -> None:
        """Write key and numbers for one replay, and advance the counters. Wait for no device."""
        host = torch.full(self._words.shape, SPENT, dtype=torch.int64)
        for place, (row, step) in enumerate(zip(self._rows, self._steps(), strict=True)):
            assert step is not None
            words = words_of(key, row.numbers(step, privacy))
            host[place, : len(words)] = torch.tensor(words, dtype=torch.int64)
            for counters in filter(None, row.counters):
                self._counts.advance(counters, step)
        on_device = self._words.is_cuda
        self._words.copy_(host.pin_memory() if on_device else host, non_blocking=on_device)

    def end_replay(self) -> None:
        """Mark the parameters as written, which autograd cannot see."""
        torch.autograd.graph.increment_version(self._parameters)


_SWITCHES = ("momentum", "nesterov", "maximize", "amsgrad", "capturable", "differentiable", "decoupled_weight_decay")


def state_of(optimizer: Optimizer) -> list[Any]:
    """Return what a captured update has fixed: which kernels run, where they write, and where options are read.

    Loading a state makes new groups, even if the tensors stay.
    """
    found: list[Any] = []
    state, pointer = optimizer.state, Tensor.data_ptr
    for group in optimizer.param_groups:
        found += [id(group), *(bool(group.get(name)) for name in _SWITCHES)]
        for parameter in group["params"]:
            found.append(id(parameter))
            if parameter in state:  # counters may move: the host reads and advances them
                found += [
                    pointer(each) for name, each in state[parameter].items() if name != "step" and each is not None
                ]
    return found

"""The step counters of an optimizer: their values known on the host, all advanced at once.

torch keeps a counter for each parameter, perhaps on the device. Adding one to hundreds of tensors of one element costs
the host more than any other part of a step, so the counters of a launch are put into one storage: each stays the tensor
that it was, as an element of a longer one, and one addition advances them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor

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

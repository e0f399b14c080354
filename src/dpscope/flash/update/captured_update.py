"""The update of a step inside a CUDA graph: what the host decides reaches it through device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.flash.kernels.tensor_lists import words_of
from dpscope.flash.update.step_counts import StepCounts

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
        self._parameters: list[nn.Parameter] = []
        self._before = state_of(optimizer)  # none is made in a graph, which would make it anew in each replay

    def add(
        self, group: dict[str, Any], step: int, numbers: Numbers, parameters: Sequence[nn.Parameter], *counters: Tensor
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
    """Return what a captured update has fixed: which kernels run, and the addresses of all that they write."""
    found: list[Any] = []
    state, pointer = optimizer.state, Tensor.data_ptr
    for group in optimizer.param_groups:
        found += [bool(group.get(name)) for name in _SWITCHES]
        for parameter in group["params"]:
            found.append(id(parameter))
            if parameter in state:  # counters may move: the host reads and advances them
                found += [
                    pointer(each) for name, each in state[parameter].items() if name != "step" and each is not None
                ]
    return found

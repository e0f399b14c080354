"""Random states of a process, held fixed where two steps are compared.

Dropout and stochastic depth are part of a step: two steps show the effect of one sample only if both draw the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """States of the generators that all code shares: torch's on every device, Python's and numpy's."""

    torch: Tensor
    cuda: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        numpy = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.random.get_state())

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def seed_all(seed: int) -> None:
    """Set all of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def left_alone() -> Iterator[None]:
    """Restore the random states afterwards."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()

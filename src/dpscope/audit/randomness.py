"""Random states of a process, held fixed where two steps are compared; and models without their randomness.

Dropout and stochastic depth are part of a step: two steps tell what one sample did only where both draw the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RandomState(NamedTuple):
    """Where the generators stand that everybody shares: torch's, on every device, Python's and numpy's."""

    torch: Tensor
    cuda: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
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
    """Afterwards they stand where they stood."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


# Attributes that hold a probability, by a part of their name, and the value that takes the randomness away.
_PROBABILITIES = {"drop": 0.0, "survival": 1.0, "keep_prob": 1.0}


def silence(model: nn.Module) -> int:
    """Switch dropout and stochastic depth off, a module's `p` or attributes (`attention_dropout`); how many modules."""
    found = 0
    for module in model.modules():
        values = {
            name: quiet
            for name, value in vars(module).items()
            for part, quiet in _PROBABILITIES.items()
            if part in name.lower() and isinstance(value, float) and value != quiet
        }
        is_dropout = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        if is_dropout and isinstance(getattr(module, "p", None), (int, float)) and module.p:
            values["p"] = 0.0
        for name, quiet in values.items():
            setattr(module, name, quiet)
        found += bool(values)
    return found

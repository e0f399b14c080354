"""Checks of the user's numbers: finite, in a sensible range, and returned as plain types.

NumPy's scalars are numbers; `True` and NaN are not. A check is called with a value and returns it as `int` or `float`,
or raises `UserError` with a sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from dpscope.errors import UserError

LARGEST_SIZE = 2**31 - 1  # of one dimension: kernels index it with 32 bits


@dataclass(frozen=True)
class WholeNumber:
    """A check for whole numbers from `least` to `most`."""

    what: str
    least: int = 1
    most: int = LARGEST_SIZE

    def __call__(self, value: object) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < self.least:
            raise UserError(f"{self.what} must be a whole number of at least {self.least}, not {_shown(value)}")
        if int(value) > self.most:
            raise UserError(f"{self.what} must be a whole number of at most {self.most}, not {_shown(value)}")
        return int(value)


@dataclass(frozen=True)
class RealNumber:
    """A check for finite numbers from `least` to `most`, and for zero if `zero` is set."""

    what: str
    least: float
    most: float
    zero: bool = False

    def __call__(self, value: object) -> float:
        try:
            number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.nan
        if not math.isfinite(number) or number < 0 or (number == 0 and not self.zero):
            raise UserError(f"{self.what} must be {self._allowed}, not {_shown(value)}")
        if number and not self.least <= number <= self.most:
            raise UserError(f"{self.what} must be {self._allowed}, from {self.least:g} to {self.most:g}, not {number}")
        return number

    @property
    def _allowed(self) -> str:
        return "zero or more" if self.zero else "a number above 0"


def _shown(value: object, longest: int = 40) -> str:
    if isinstance(value, Integral) and abs(int(value)) >= 10**longest:
        return f"a number of more than {longest} digits"
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"


BATCH_SIZE = WholeNumber("batch size")
RANKS = WholeNumber("the number of processes", 1, 4096)
LINK_GBPS = RealNumber("--link-gbps, in Gbit/s,", least=1e-3, most=1e6)
ACCUMULATE = WholeNumber("accumulate", 1, 10**6)  # batches in a step
MEMORY_BUDGET = RealNumber("the memory budget in GiB", least=1e-3, most=1e6)
TRIED_SIZE = WholeNumber("--sizes", 1, 2**16)  # of batches on which a training loop is tried, each many times
SEQUENCE_LENGTH = WholeNumber("sequence length")
WARMUP_STEPS = WholeNumber("warm-up steps", 0, 10**6)
STEPS = WholeNumber("steps", 1, 10**6)
SEED = WholeNumber("seed", 0, 2**63 - 1)  # what torch's generators take

LEARNING_RATE = RealNumber("learning rate", 1e-12, 1e6)
NOISE_MULTIPLIER = RealNumber("noise multiplier", 1e-12, 1e6, zero=True)
# Clipped gradients and the noise scale with it: outside of this range float32 turns them to zero or infinity.
MAX_GRAD_NORM = RealNumber("max grad norm", 1e-12, 1e12)
TOLERANCE = RealNumber("tolerance", 1e-15, 0.1)  # a method that does nothing has a relative error of 1

TIMEOUT_SECONDS = RealNumber("--timeout", 1e-3, 1e7)
MEMORY_LIMIT = RealNumber("--memory-limit", 1.0, 2.0**62)

"""What Opacus's accountants computed is remembered: tests ask for the same noise again and again, in pure Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from opacus.accountants import PRVAccountant
from opacus.accountants.analysis import rdp


def install() -> None:
    rdp._compute_log_a = cache(rdp._compute_log_a)  # of a sampling rate, a noise multiplier and an order
    PRVAccountant.get_epsilon = remembered_by_history(PRVAccountant.get_epsilon)


def remembered_by_history(get_epsilon: Callable[..., float]) -> Callable[..., float]:
    """Return an accountant's `get_epsilon` that computes once for each history and each set of arguments."""

    @cache
    def of(kind: type[PRVAccountant], history: tuple[tuple[float, float, int], ...], *given: Any) -> float:
        accountant = kind()
        accountant.history = list(history)
        delta, options = given
        return get_epsilon(accountant, delta, **dict(options))

    @wraps(get_epsilon)
    def remembered(self: PRVAccountant, delta: float, **options: Any) -> float:
        return of(type(self), tuple(self.history), delta, tuple(sorted(options.items())))

    return remembered

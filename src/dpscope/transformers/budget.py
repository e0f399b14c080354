"""How many steps a target ε allows."""

from __future__ import annotations

from typing import Any

from opacus.accountants import create_accountant

MOST_STEPS_LEFT = 2**40


def steps_left(accountant: Any, *, noise_multiplier: float, sample_rate: float, epsilon: float, delta: float) -> int:
    """Return how many more steps keep ε at or below the target."""
    trial = create_accountant(mechanism=accountant.mechanism())

    def fits(steps: int) -> bool:
        history = list(accountant.history)
        if history and tuple(history[-1][:2]) == (noise_multiplier, sample_rate):  # as accountants do
            steps += history.pop()[2]
        trial.history = [*history, (noise_multiplier, sample_rate, steps)]
        return bool(trial.get_epsilon(delta=delta) <= epsilon)

    if noise_multiplier == 0 or not fits(1):
        return 0
    low, high = 1, 2  # low fits
    while fits(high):
        low, high = high, 2 * high
        if high > MOST_STEPS_LEFT:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""ε of the steps so far, quickly, and how many steps a target ε allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.analysis import rdp

MOST_STEPS_LEFT = 2**40


def epsilon_of(accountant: Any, delta: float) -> float:
    """Return what the accountant says. Rényi divergences of equal steps add up: those of one are computed once."""
    if type(accountant) is not RDPAccountant:
        return float(accountant.get_epsilon(delta=delta))
    orders = tuple(accountant.DEFAULT_ALPHAS)
    spent = sum(steps * _divergences(noise, rate, orders) for noise, rate, steps in accountant.history)
    return float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])


@cache
def _divergences(noise: float, rate: float, orders: tuple[float, ...]) -> Any:
    return np.asarray(rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders))


def steps_left(accountant: Any, *, noise_multiplier: float, sample_rate: float, epsilon: float, delta: float) -> int:
    """Return how many more steps keep ε at or below the target."""
    trial = create_accountant(mechanism=accountant.mechanism())

    def fits(steps: int) -> bool:
        history = list(accountant.history)
        if history and tuple(history[-1][:2]) == (noise_multiplier, sample_rate):  # as accountants do
            steps += history.pop()[2]
        trial.history = [*history, (noise_multiplier, sample_rate, steps)]
        return epsilon_of(trial, delta) <= epsilon

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

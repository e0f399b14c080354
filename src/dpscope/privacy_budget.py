"""Privacy budget of a training run inside another library: what is spent, and how many steps a target ε leaves."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.analysis import rdp
from opacus.accountants.utils import get_noise_multiplier
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.opacus.privacy_spent import as_steps, continued

MOST_STEPS_LEFT = 2**40


def epsilon_of(accountant: Any, delta: float) -> float:
    """Return the accountant's ε. Rényi divergences of equal steps add up, so each kind of step is computed once."""
    if type(accountant) is not RDPAccountant:
        return float(accountant.get_epsilon(delta=delta))
    orders = tuple(accountant.DEFAULT_ALPHAS)
    spent = sum(steps * _divergences(noise, rate, orders) for noise, rate, steps in accountant.history)
    return float(rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0])


@cache
def _divergences(noise: float, rate: float, orders: tuple[float, ...]) -> Any:
    return np.asarray(rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders))


class SpentPrivacy:
    """The accountant's history as a state that frameworks save and load; sharded optimizers do not hold it.

    If the user's loader has a generator, its state is part of it: the draws after an epoch continue. Other draws are
    secret, and stay out of checkpoints.
    """

    def __init__(self, accountant: Any) -> None:
        self.accountant = accountant
        self._draws: torch.Generator | None = None
        self._saved_draws: Tensor | None = None

    def follow(self, draws: torch.Generator | None) -> bool:
        """Save the state of a loader's generator from now on, and set it to one that was loaded before.

        Return whether a resumed run repeats the draws. Only then may it repeat noise: the same noise on other draws
        would reveal the difference.
        """
        self._draws = draws
        self._continue_draws()
        return draws is not None

    def state_dict(self) -> dict[str, Any]:
        draws = {} if self._draws is None else {"draws": self._draws.get_state()}
        return {"history": as_steps(self.accountant.history), **draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accountant.history = continued(self.accountant.history, state["history"])
        self._saved_draws = state.get("draws")
        self._continue_draws()

    def _continue_draws(self) -> None:
        if self._draws is not None and self._saved_draws is not None:
            self._draws.set_state(self._saved_draws.cpu())


class PrivacyBudget(SpentPrivacy):
    """Budget of a run: spent privacy, and what is left up to a target ε. With given noise there is no limit.

    delta   at which ε is told
    """

    def __init__(
        self, accountant: Any, *, delta: float, target_epsilon: float | None, noise_multiplier: float | None
    ) -> None:
        super().__init__(accountant)
        if (target_epsilon is None) == (noise_multiplier is None):
            raise UserError("private training needs one of target_epsilon and noise_multiplier: give one of the two")
        if target_epsilon is not None and not 0 < target_epsilon < math.inf:
            raise UserError(f"target_epsilon must be a number, above 0, not {target_epsilon}")
        if noise_multiplier is not None and not 0 <= noise_multiplier < math.inf:
            raise UserError(f"noise_multiplier must be a number, 0 or more, not {noise_multiplier}")
        if not 0 < delta < 1:
            raise UserError(f"target_delta must be between 0 and 1, not {delta}")
        self.delta, self.target, self.noise = delta, target_epsilon, noise_multiplier

    def epsilon(self, delta: float | None = None) -> float:
        """Return ε of all steps so far."""
        return epsilon_of(self.accountant, self.delta if delta is None else delta) if self.accountant.history else 0.0

    def noise_for(self, steps: int, sample_rate: float) -> float:
        """Return the noise multiplier as given, or what the target ε needs for so many steps."""
        if self.noise is not None:
            return self.noise
        try:
            multiplier: float = get_noise_multiplier(
                target_epsilon=self.target,
                target_delta=self.delta,
                sample_rate=sample_rate,
                steps=steps,
                accountant=self.accountant.mechanism(),
            )
        except ValueError as too_low:
            raise UserError(
                f"no noise reaches target_epsilon={self.target:g} at δ={self.delta:g} in {steps} steps of sample rate "
                f"{sample_rate:.3g}: give a larger target_epsilon, fewer steps or a smaller batch"
            ) from too_low
        return multiplier

    def doubt_delta(self, samples: int) -> None:
        """Warn of a δ that is not below 1 / samples: publishing one sample of the data would satisfy it."""
        if self.delta >= 1 / samples:
            warnings.warn(
                f"target_delta={self.delta:g} is not below 1 / {samples} samples, and promises little: publishing one "
                f"sample whole would satisfy it. Give less, such as {0.1 / samples:.0e}",
                stacklevel=3,
            )

    def steps_left(self, noise_multiplier: float, sample_rate: float) -> int | None:
        """Return how many more steps the target ε allows; None without a target."""
        if self.target is None:
            return None
        spend = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
        return steps_left(self.accountant, **spend, epsilon=self.target, delta=self.delta)

    def require_left(self, noise_multiplier: float, sample_rate: float) -> None:
        """Raise UserError if the target ε allows no further step."""
        if self.steps_left(noise_multiplier, sample_rate) == 0:
            raise UserError(
                f"target_epsilon={self.target:g} is spent (ε = {self.epsilon():.3f}): no further step is allowed; give "
                "a larger target_epsilon"
            )


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

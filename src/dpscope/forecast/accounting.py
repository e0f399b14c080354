"""Sampling and privacy of a plan, by Opacus's own accountants (docs/plan.md)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier

from dpscope.errors import UserError

ACCOUNTANTS = ("prv", "rdp")
STEPS_TRIED = 2**24
LARGEST_EPSILON = 200  # that is accounted for: it protects nobody, and the PRV accountant takes minutes for more


@dataclass(frozen=True, kw_only=True)
class Privacy:
    samples: int
    logical_batch: int
    sample_rate: float
    expected_batch: int
    steps: int
    epochs: float
    noise_multiplier: float
    delta: float
    epsilon: dict[str, float]  # by accountant
    accountant: str  # by which the noise multiplier, or the number of steps, was found
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrivacyGoal:
    """Known values of a run's privacy. One of epsilon, noise and length may be left open."""

    samples: int
    logical_batch: int
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    epochs: float | None = None
    steps: int | None = None
    accountant: str = "prv"

    def __post_init__(self) -> None:
        for name in ("epsilon", "noise_multiplier", "epochs", "delta"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name.replace('_', ' ')} must be a number above 0, not {value}")
        if self.delta is not None and self.delta >= 1:
            raise UserError(f"delta must be below 1, not {self.delta}: below 1 / samples is usual")
        if not 1 <= self.logical_batch <= self.samples:
            raise UserError(
                f"a logical batch of {self.logical_batch} needs as many samples, and there are {self.samples}"
            )
        if self.accountant not in ACCOUNTANTS:
            raise UserError(f"unknown accountant {self.accountant!r}: choose one of {', '.join(ACCOUNTANTS)}")

    @property
    def batches(self) -> int:
        """Number of batches in an epoch, as Opacus's loader has them."""
        return int(1 / self.sample_rate)

    @property
    def sample_rate(self) -> float:
        return 1 / math.ceil(self.samples / self.logical_batch)


def account(goal: PrivacyGoal) -> Privacy:
    """Solve for what a goal leaves open; raise `UserError` if the given values contradict each other."""
    delta = goal.delta or 1 / (10 * goal.samples)
    rate = goal.sample_rate
    with _quiet():
        steps, noise = _solved(goal, delta, rate)
        about = epsilon_of(noise, rate, steps, delta, "rdp")
        if not about <= LARGEST_EPSILON:
            raise UserError(
                f"{steps} steps at noise multiplier {noise:g} take epsilon {about:.3g}, which protects nobody: add "
                "noise, or train less"
            )
        spent = {name: epsilon_of(noise, rate, steps, delta, name) for name in ACCOUNTANTS}
    if goal.epsilon is not None and goal.noise_multiplier is not None and spent[goal.accountant] > goal.epsilon * 1.001:
        most = _most_steps(goal, delta, rate)
        raise UserError(
            f"{steps / goal.batches:.4g} epochs at noise multiplier {noise:g} take epsilon "
            f"{spent[goal.accountant]:.3g}: epsilon {goal.epsilon:g} allows {most / goal.batches:.3g} epochs, or leave "
            "one of the three open"
        )
    return Privacy(
        samples=goal.samples,
        logical_batch=goal.logical_batch,
        sample_rate=rate,
        expected_batch=int(goal.samples * rate),
        steps=steps,
        epochs=steps / goal.batches,
        noise_multiplier=noise,
        delta=delta,
        epsilon=spent,
        accountant=goal.accountant,
        notes=tuple(_notes(goal)),
    )


def epsilon_of(noise: float, rate: float, steps: int, delta: float, accountant: str) -> float:
    """Return epsilon after so many steps, as Opacus's accountant says."""
    counted = create_accountant(mechanism=accountant)
    counted.history = [(noise, rate, steps)]
    return float(counted.get_epsilon(delta=delta))


def _solved(goal: PrivacyGoal, delta: float, rate: float) -> tuple[int, float]:
    """Return the number of steps and the noise multiplier."""
    steps = goal.steps
    if steps is None and goal.epochs is not None:
        whole = float(goal.epochs).is_integer()
        steps = int(goal.epochs) * goal.batches if whole else int(goal.epochs / rate)
    if steps is None:
        if goal.epsilon is None or goal.noise_multiplier is None:
            raise UserError(
                "how long to train is open: give --epochs, --hours, or both --epsilon and --noise-multiplier"
            )
        steps = _most_steps(goal, delta, rate)
    if steps < 1:
        raise UserError("that is less than one step: give more epochs or hours, a larger epsilon, or more noise")
    if goal.noise_multiplier is not None:
        return steps, goal.noise_multiplier
    if goal.epsilon is None:
        raise UserError("the noise is open: give --epsilon or --noise-multiplier")
    length = {"steps": steps} if goal.steps is not None else {"epochs": goal.epochs}
    try:
        noise = get_noise_multiplier(
            target_epsilon=goal.epsilon, target_delta=delta, sample_rate=rate, accountant=goal.accountant, **length
        )
    except ValueError as error:
        raise UserError(f"no noise gives epsilon {goal.epsilon:g} ({error}): ask for more, or train less") from None
    return steps, float(noise)


def _most_steps(goal: PrivacyGoal, delta: float, rate: float) -> int:
    """Return the largest number of steps whose epsilon is within the goal."""
    assert goal.epsilon is not None
    assert goal.noise_multiplier is not None

    def fits(steps: int) -> bool:
        return epsilon_of(goal.noise_multiplier or 0, rate, steps, delta, goal.accountant) <= (goal.epsilon or 0)

    if not fits(1):
        raise UserError(
            f"a step at noise multiplier {goal.noise_multiplier:g} takes more than epsilon {goal.epsilon:g}: add noise"
        )
    low, high = 1, 2
    while high < STEPS_TRIED and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _notes(goal: PrivacyGoal) -> Iterator[str]:
    expected = int(goal.samples * goal.sample_rate)
    if expected != goal.logical_batch:
        yield (
            f"Opacus's loader rounds the sampling rate to one in {round(1 / goal.sample_rate)}: {expected} samples are "
            f"expected in a batch, not {goal.logical_batch}."
        )
    if goal.delta is not None and goal.delta * goal.samples >= 1:
        yield (
            f"δ = {goal.delta:g} is not below 1 / samples: it allows to publish a whole sample. Give a smaller --delta."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of alphas at the ends of their range
        yield

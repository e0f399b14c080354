"""Sampling and privacy of a plan, by Opacus's own accountants (docs/plan.md)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier

from dpscope.errors import UserError

ACCOUNTANTS = ("prv", "rdp")
MOST_STEPS_ACCOUNTED = 2**22  # that are accounted for: the PRV accountant's memory grows with their root
EPSILONS = (0.001, 200.0)  # that are accounted for: below, the PRV accountant takes minutes; above, nobody is protected
ROUNDED = 0.001  # by which a given noise multiplier may miss the given epsilon
USUAL_ERROR = 0.01  # that Opacus's PRV accountant adds to epsilon, unless told otherwise


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
    epsilon: dict[str, float | None]  # by accountant; None if it cannot tell
    accountant: str  # by which the noise multiplier, or the number of steps, was found
    eps_error: float  # that the PRV accountant adds to epsilon
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
        if self.delta is not None and self.delta >= 0.5:
            raise UserError(f"delta must be below 1/2, not {self.delta}: below 1 / samples is usual")
        least, most = EPSILONS
        if self.epsilon is not None and not least <= self.epsilon <= most:
            why = "Opacus's accountants cannot tell less" if self.epsilon < least else "more protects nobody"
            raise UserError(f"epsilon must be between {least:g} and {most:g}, not {self.epsilon:g}: {why}")
        if not 1 <= self.logical_batch <= self.samples:
            raise UserError(
                f"a logical batch of {self.logical_batch} needs as many samples, and there are {self.samples}"
            )
        if self.accountant not in ACCOUNTANTS:
            raise UserError(f"unknown accountant {self.accountant!r}: choose one of {', '.join(ACCOUNTANTS)}")

    @property
    def usual_delta(self) -> float:
        return self.delta or 1 / (10 * self.samples)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch, as Opacus's loader has them."""
        return int(1 / self.sample_rate)

    @property
    def sample_rate(self) -> float:
        return 1 / math.ceil(self.samples / self.logical_batch)

    @property
    def expected_batch(self) -> int:
        return int(self.samples * self.sample_rate)

    @property
    def length(self) -> int | None:
        """Number of steps, as Opacus's loader makes epochs; None if it is open."""
        if self.steps is not None or self.epochs is None:
            return self.steps
        whole = float(self.epochs).is_integer()
        return int(self.epochs) * self.batches if whole else int(self.epochs / self.sample_rate)


def account(goal: PrivacyGoal) -> Privacy:
    """Solve for what a goal leaves open; raise `UserError` if the given values contradict each other."""
    delta, rate = goal.usual_delta, goal.sample_rate
    with _quiet():
        steps, noise = _solved(goal)
        if goal.noise_multiplier is not None and goal.epsilon is not None and not _is_within(goal, steps, ROUNDED):
            most = _most_steps(goal)
            raise UserError(
                f"{steps / goal.batches:.4g} epochs at noise multiplier {noise:g} take more than epsilon "
                f"{goal.epsilon:g}: it allows {most / goal.batches:.3g} epochs, or leave one of the three open"
            )
        about = goal.epsilon or epsilon_of(noise, rate, steps, delta, "rdp")
        if not about <= EPSILONS[1]:
            raise UserError(
                f"{steps} steps at noise multiplier {noise:g} take epsilon {about:.3g}, which protects nobody: add "
                "noise, or train less"
            )
        error = prv_error(about)
        spent = {name: _told(noise, rate, steps, delta, name, error) for name in ACCOUNTANTS}
        if spent[goal.accountant] is None:
            raise UserError(_cannot_tell(goal.accountant))
        if goal.epsilon is None and (finer := prv_error(spent["prv"] or about)) < error:
            error = finer
            spent["prv"] = _told(noise, rate, steps, delta, "prv", error)
    return Privacy(
        samples=goal.samples,
        logical_batch=goal.logical_batch,
        sample_rate=rate,
        expected_batch=goal.expected_batch,
        steps=steps,
        epochs=steps / goal.batches,
        noise_multiplier=noise,
        delta=delta,
        epsilon=spent,
        accountant=goal.accountant,
        eps_error=error,
        notes=tuple(_notes(goal, steps, spent, error)),
    )


def prv_error(epsilon: float) -> float:
    """Return the error that the PRV accountant may add to an epsilon: Opacus's, if it is from a tenth to a thousandth.

    With Opacus's 0.01, an epsilon of 0.01 needs endless noise, and one of 100 takes minutes.
    """
    error = max(min(USUAL_ERROR, epsilon / 10), epsilon / 1000)
    return float(f"{error:.1g}")  # a number that can be typed


def _options(accountant: str, error: float) -> dict[str, float]:
    """Return what the accountant's `get_epsilon` is asked with, beside delta."""
    return {"eps_error": error} if accountant == "prv" and error != USUAL_ERROR else {}


def epsilon_of(
    noise: float, rate: float, steps: int, delta: float, accountant: str, error: float = USUAL_ERROR
) -> float:
    """Return epsilon after so many steps, as Opacus's accountant says."""
    counted = create_accountant(mechanism=accountant)
    counted.history = [(noise, rate, steps)]
    return float(counted.get_epsilon(delta=delta, **_options(accountant, error)))


_FAILURES = (ValueError, RuntimeError, MemoryError)  # of Opacus's accountants, where their numbers do not suffice


def _told(noise: float, rate: float, steps: int, delta: float, accountant: str, error: float) -> float | None:
    """Return epsilon; None if the accountant cannot tell it."""
    try:
        return epsilon_of(noise, rate, steps, delta, accountant, error)
    except _FAILURES:
        return None


def _cannot_tell(accountant: str) -> str:
    other = next(name for name in ACCOUNTANTS if name != accountant)
    return (
        f"Opacus's {accountant.upper()} accountant cannot tell epsilon of this: try --accountant {other}, or a larger "
        "delta"
    )


def _solved(goal: PrivacyGoal) -> tuple[int, float]:
    """Return the number of steps and the noise multiplier."""
    steps = goal.length
    if steps is None:
        if goal.epsilon is None or goal.noise_multiplier is None:
            raise UserError(
                "how long to train is open: give --epochs, --hours, or both --epsilon and --noise-multiplier"
            )
        steps = _most_steps(goal)
    if steps < 1:
        raise UserError("that is less than one step: give more epochs or hours, a larger epsilon, or more noise")
    if steps > MOST_STEPS_ACCOUNTED:
        raise UserError(f"{steps} steps are more than can be accounted for ({MOST_STEPS_ACCOUNTED}): train less")
    if goal.noise_multiplier is not None:
        return steps, goal.noise_multiplier
    if goal.epsilon is None:
        raise UserError("the noise is open: give --epsilon or --noise-multiplier")
    length = {"steps": steps} if goal.steps is not None else {"epochs": goal.epochs}
    options = _options(goal.accountant, error := prv_error(goal.epsilon))
    if options:
        options["epsilon_tolerance"] = error
    try:
        noise = get_noise_multiplier(
            target_epsilon=goal.epsilon,
            target_delta=goal.usual_delta,
            sample_rate=goal.sample_rate,
            accountant=goal.accountant,
            **length,
            **options,
        )
    except _FAILURES:
        other = next(name for name in ACCOUNTANTS if name != goal.accountant)
        raise UserError(
            f"Opacus's {goal.accountant.upper()} accountant finds no noise for epsilon {goal.epsilon:g} at delta "
            f"{goal.usual_delta:.1e}: try --accountant {other}, ask for more, or train less"
        ) from None
    return steps, float(noise)


def _is_within(goal: PrivacyGoal, steps: int, tolerance: float = 0.0) -> bool:
    """Return whether epsilon after so many steps is within the goal.

    RDP is asked first: the PRV accountant's memory grows with epsilon, to more than a machine has.
    """
    noise, epsilon, delta, rate = goal.noise_multiplier or 0.0, goal.epsilon or 0.0, goal.usual_delta, goal.sample_rate
    try:
        if epsilon_of(noise, rate, steps, delta, "rdp") > 1 + 2 * epsilon:
            return False
        spent = epsilon_of(noise, rate, steps, delta, goal.accountant, prv_error(epsilon))
    except _FAILURES:
        raise UserError(_cannot_tell(goal.accountant)) from None
    return spent <= epsilon * (1 + tolerance)


def _most_steps(goal: PrivacyGoal) -> int:
    """Return the largest number of steps whose epsilon is within the goal; `MOST_STEPS_ACCOUNTED` if it allows more."""
    fits = partial(_is_within, goal)
    if not fits(1):
        raise UserError(
            f"a step at noise multiplier {goal.noise_multiplier:g} takes more than epsilon {goal.epsilon:g}: add noise"
        )
    low, high = 1, 2
    while high <= MOST_STEPS_ACCOUNTED and fits(high):
        low, high = high, 2 * high
    while low < MOST_STEPS_ACCOUNTED and high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _notes(goal: PrivacyGoal, steps: int, spent: dict[str, float | None], error: float) -> Iterator[str]:
    if goal.expected_batch != goal.logical_batch:
        yield (
            f"Opacus's loader rounds the sampling rate to one in {round(1 / goal.sample_rate)}: {goal.expected_batch} "
            f"samples are expected in a batch, not {goal.logical_batch}."
        )
    if goal.delta is not None and goal.delta * goal.samples >= 1:
        yield (
            f"δ = {goal.delta:g} is not below 1 / samples: it allows to publish a whole sample. Give a smaller --delta."
        )
    prv, rdp = spent["prv"], spent["rdp"]
    if error != USUAL_ERROR and prv is not None:
        yield (
            f"Opacus's PRV accountant adds {USUAL_ERROR} to ε unless told otherwise. This plan tells it: ask for the "
            f"same ε with engine.accountant.get_epsilon(delta, eps_error={error:.3g})."
        )
    if goal.accountant == "rdp" and prv is not None and rdp is not None and prv < rdp / 2:
        yield f"RDP overstates so small an ε: by PRV it is {prv:.2g}, and --accountant prv needs less noise."
    if goal.epochs is None and goal.steps is None and steps == MOST_STEPS_ACCOUNTED:
        yield f"ε allows more than {MOST_STEPS_ACCOUNTED} steps: more are not accounted for."


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of alphas at the ends of their range
        yield

"""Privacy records: ε so far, the steps that a target ε allows, and privacy.json in a Trainer's checkpoint.

privacy.json holds the seed of the draws. Anyone who has it knows which samples took part in which step, and privacy by
sampling is lost. Keep checkpoints; publish the model that `save_model` writes, which has no such file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.analysis import rdp

from dpscope.errors import UserError

MOST_STEPS_LEFT = 2**40


def epsilon_of(accountant: Any, delta: float) -> float:
    """Return what the accountant says. Rényi divergences of equal steps add up, so that one step is computed once."""
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


PRIVACY_FILE = "privacy.json"
NOISE_FILE = "noise.pt"  # of sharded models: where the noise of a given seed stands, and which keys were used
VERSION = 1


@dataclass(frozen=True)
class PrivacyRecord:
    """Spent privacy and state of the draws; `history`: (noise multiplier, sample rate, steps) of the accountant."""

    history: list[tuple[float, float, int]]
    mechanism: str
    noise_multiplier: float
    sample_rate: float
    draw_seed: int

    def save(self, folder: Path) -> None:
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PRIVACY_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PrivacyRecord:
        """Raise UserError if the checkpoint does not say what privacy its run has spent."""
        try:
            saved: dict[str, Any] = json.loads((folder / PRIVACY_FILE).read_text(encoding="utf-8"))
            version = saved.pop("version")
            saved["history"] = [(float(sigma), float(rate), int(steps)) for sigma, rate, steps in saved["history"]]
            record = cls(**saved)
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(
                f"{folder} has no readable {PRIVACY_FILE}, so the privacy that its run has spent is not known and ε "
                "would come out too small: resume from a checkpoint of a private trainer"
            ) from None
        if version != VERSION:
            raise UserError(f"{folder / PRIVACY_FILE} is of version {version}, and this dpscope reads {VERSION}")
        return record

"""Models that draw at random are judged by what a sample does, not by what they draw."""

from __future__ import annotations

import random

import numpy as np
import opacus
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dpscope
from dpscope.flash import PrivacyEngine
from dpscope.random_states import RandomStates, all_gpus, random_states_kept, seed_all
from tests.unit.audit.engine_loops import DATA, loop_of

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook")


class StochasticDepth(nn.Module):
    """Leaves a block out for a sample, by an attribute that says so, or by one that nobody knows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, 0.4)

    def forward(self, x):
        left_out = getattr(self, self.name)
        return x * (torch.rand(len(x), 1, 1) >= left_out) / (1 - left_out)


class Random(nn.Module):
    """(B, T, d) -> (B, classes), with whatever draws at random in the middle."""

    def __init__(self, *parts: nn.Module, mixes: bool = False) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.parts, self.mixes = nn.Sequential(*parts), mixes

    def forward(self, x):
        x = self.parts(torch.tanh(self.inside(x)))
        x = x - x.mean(0) if self.mixes and len(x) else x
        return self.head(x.mean(1))


MODELS = {
    "dropout": lambda: Random(nn.Dropout(0.3)),
    "two dropouts": lambda: Random(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1)),
    "stochastic depth": lambda: Random(StochasticDepth("drop_prob")),
    "randomness that cannot be switched off": lambda: Random(StochasticDepth("chance")),
}


def audit(engine, model, seed=0):
    return dpscope.check_loop(loop_of(engine, model=model), DataLoader(DATA, batch_size=4), seed=seed)


@pytest.mark.parametrize("engine", [opacus.PrivacyEngine, PrivacyEngine])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_draws_at_random_raises_no_alarm(engine, name):
    found = audit(engine, MODELS[name])
    assert found.ok and not found.breached, str(found)
    untried = [reason for reason in found.neighbours.untried if reason.startswith("removing one of several samples")]
    assert bool(untried) == (name == "randomness that cannot be switched off")


@pytest.mark.parametrize("name", MODELS)
def test_samples_that_mix_are_found_in_a_model_that_draws_at_random(name):
    made = MODELS[name]

    def mixing():
        model = made()
        model.mixes = True
        return model

    found = audit(opacus.PrivacyEngine, mixing)
    assert found.neighbours.verdict == "BREACH" and found.noise.verdict == "held", str(found)
    assert any("samples meet" in fault and "Dropout" not in fault for fault in found.neighbours.faults)


def test_a_share_that_depends_on_the_size_is_found_in_a_model_with_dropout():
    """By removing a sample, for which the model's randomness is switched off."""

    def summed(model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum")

    found = dpscope.check_loop(
        loop_of(opacus.PrivacyEngine, summed, model=MODELS["dropout"]), DataLoader(DATA, batch_size=4)
    )
    assert found.neighbours.faults[1].startswith("a sample's share depends on the batch's own size")


def test_an_audit_leaves_random_generators_where_they_stood():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    audit(PrivacyEngine, MODELS["dropout"])
    assert torch.equal(torch.get_rng_state(), before)


def draws():
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def test_all_generators_are_seeded_and_restored():
    with random_states_kept(all_gpus()):
        seed_all(3)
        first = draws()
        state = RandomStates.now(all_gpus())
        second = draws()
        state.put_back()
        assert draws() == second
        seed_all(3)
        assert draws() == first

"""Steps, noise and epsilon of a plan are Opacus's, and those of training by the plan."""

from __future__ import annotations

import math

import pytest
import torch
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.forecast.accounting import PrivacyGoal, account


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "epsilon"), [(1000, 100, 3, 8.0), (1000, 96, 2.5, 2.0), (50_000, 512, 1, 3.0)]
)
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_noise_is_that_of_opacus(samples, batch, epochs, epsilon, accountant):
    goal = PrivacyGoal(
        samples=samples, logical_batch=batch, epochs=epochs, epsilon=epsilon, delta=1e-5, accountant=accountant
    )
    found = account(goal)
    rate = 1 / math.ceil(samples / batch)
    wanted = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=1e-5, sample_rate=rate, epochs=epochs, accountant=accountant
    )
    assert found.noise_multiplier == wanted
    assert found.steps == int(epochs / rate)
    for name in ("rdp", "prv"):
        spent = create_accountant(name)
        spent.history = [(wanted, rate, found.steps)]
        assert found.epsilon[name] == spent.get_epsilon(1e-5)
    assert found.epsilon[accountant] <= epsilon


def test_training_by_a_plan_ends_with_its_epsilon():
    samples, batch = 64, 20
    found = account(PrivacyGoal(samples=samples, logical_batch=batch, epochs=2, epsilon=6.0, delta=1e-3))
    assert found.expected_batch == 16
    assert "16 samples are expected" in " ".join(found.notes)
    model = nn.Linear(3, 2)
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(samples, 3), torch.randint(2, (samples,))), batch_size=batch),
        noise_multiplier=found.noise_multiplier,
        max_grad_norm=1.0,
    )
    steps = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    assert steps == found.steps
    assert optimizer.expected_batch_size == found.expected_batch
    assert engine.get_epsilon(1e-3) == pytest.approx(found.epsilon["prv"], rel=1e-9)


def test_the_epochs_that_epsilon_allows_are_found():
    goal = {"samples": 1000, "logical_batch": 100, "noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    found = account(PrivacyGoal(**goal, epsilon=4.0))
    assert found.epsilon["rdp"] <= 4.0
    longer = account(PrivacyGoal(**goal, epochs=(found.steps + found.steps // 200 + 2) / 10))
    assert longer.epsilon["rdp"] > 4.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"epsilon": 0.0}, "epsilon must be a number above 0"),
        ({"epsilon": math.nan}, "epsilon must be a number above 0"),
        ({"epsilon": 3.0, "noise_multiplier": 1.0, "epochs": 50}, "allows .* epochs"),
        ({"epsilon": 1.0}, "how long to train is open"),
        ({"epochs": 1}, "the noise is open"),
        ({"epsilon": 1.0, "epochs": 1, "logical_batch": 2000}, "needs as many samples"),
        ({"epsilon": 1.0, "epochs": 1, "delta": 1.5}, "delta must be below 1"),
        ({"noise_multiplier": 0.5, "epochs": 4000, "accountant": "prv"}, "protects nobody: add noise"),
    ],
)
def test_wrong_input_ends_in_a_sentence(wrong, says):
    given = {"samples": 1000, "logical_batch": 100, "accountant": "rdp", **wrong}
    with pytest.raises(UserError, match=says):
        account(PrivacyGoal(**given))


def test_a_delta_that_allows_to_publish_a_sample_is_said():
    goal = {"samples": 1000, "logical_batch": 100, "noise_multiplier": 1.0, "epochs": 1}
    assert "not below 1 / samples" in " ".join(account(PrivacyGoal(**goal, delta=0.001)).notes)
    assert not account(PrivacyGoal(**goal, delta=0.0009)).notes

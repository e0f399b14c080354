"""Steps, noise and epsilon of a plan are Opacus's, and those of training by the plan."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.forecast import accounting
from dpscope.forecast.accounting import PrivacyGoal, account

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order", "ignore:divide by zero")  # Opacus's, at the ends

# samples, logical batch, epochs, epsilon. Batches that divide the samples and others; 391 batches, of which the sampler
# draws 390, because 1 / (1 / 391) is below 391; whole epochs and parts of one; a batch of all samples.
GRID = [
    (1000, 96, 1, 1.0),
    (1000, 96, 3, 8.0),
    (1000, 96, 2.5, 2.0),
    (1000, 100, 1, 0.1),
    (1000, 100, 3, 10.0),
    (1000, 500, 2, 4.0),
    (300, 300, 10, 4.0),
    (50_000, 500, 1, 3.0),
    (50_000, 512, 10, 0.5),
    (100_000, 256, 3, 2.0),
]


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize(("samples", "batch", "epochs", "epsilon"), GRID)
def test_steps_noise_and_epsilon_are_those_of_opacus(samples, batch, epochs, epsilon, accountant):
    goal = {"samples": samples, "logical_batch": batch, "epochs": epochs, "epsilon": epsilon, "delta": 1e-5}
    rate = 1 / math.ceil(samples / batch)
    try:
        wanted = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=1e-5, sample_rate=rate, epochs=epochs, accountant=accountant
        )
    except ValueError:
        with pytest.raises(UserError, match=r"finds no noise for epsilon 0\.1"):
            account(PrivacyGoal(**goal, accountant=accountant))
        return
    found = account(PrivacyGoal(**goal, accountant=accountant))
    drawn = UniformWithReplacementSampler(num_samples=samples, sample_rate=rate).steps
    assert found.noise_multiplier == wanted
    assert found.steps == (epochs * drawn if isinstance(epochs, int) else int(epochs / rate))
    for name in ("rdp", "prv"):
        spent = create_accountant(name)
        spent.history = [(wanted, rate, found.steps)]
        assert found.epsilon[name] == spent.get_epsilon(1e-5)
    assert found.epsilon[accountant] <= epsilon


@pytest.mark.parametrize(("epsilon", "most_noise"), [(0.05, 8), (0.01, 15), (60.0, 1)])
def test_the_error_of_the_prv_accountant_suits_epsilon(epsilon, most_noise):
    """With Opacus's own 0.01, an epsilon of 0.01 took a noise multiplier of 80,000, and one of 60 a quarter minute."""
    found = account(PrivacyGoal(samples=100_000, logical_batch=256, epochs=0.5, epsilon=epsilon))
    assert found.noise_multiplier < most_noise
    asked = {"target_delta": found.delta, "sample_rate": found.sample_rate, "accountant": "prv"}
    precise = {"eps_error": found.eps_error, "epsilon_tolerance": found.eps_error}
    assert found.noise_multiplier == get_noise_multiplier(target_epsilon=epsilon, epochs=0.5, **asked, **precise)
    spent = create_accountant("prv")
    spent.history = [(found.noise_multiplier, found.sample_rate, found.steps)]
    assert 0.8 * epsilon < found.epsilon["prv"] <= epsilon
    assert found.epsilon["prv"] == spent.get_epsilon(found.delta, eps_error=found.eps_error)
    assert f"get_epsilon(delta, eps_error={found.eps_error:g})" in found.notes[-1]


def test_a_small_epsilon_of_given_noise_is_not_the_error_of_the_accountant():
    found = account(PrivacyGoal(samples=100_000, logical_batch=256, epochs=1, noise_multiplier=100.0))
    assert found.epsilon["prv"] < 0.003
    assert "eps_error=0.001)" in found.notes[-1]


def test_noise_that_rdp_wastes_on_a_small_epsilon_is_said():
    found = account(PrivacyGoal(samples=100_000, logical_batch=256, epochs=3, epsilon=0.15, accountant="rdp"))
    assert found.epsilon["prv"] < 0.03
    assert "--accountant prv needs less noise" in found.notes[-1]


def test_an_epsilon_that_one_accountant_cannot_tell_is_left_out():
    goal = {"samples": 10**6, "logical_batch": 1000, "epochs": 1, "epsilon": 3.0, "delta": 1e-18}
    found = account(PrivacyGoal(**goal, accountant="rdp"))
    assert found.epsilon["prv"] is None
    assert found.epsilon["rdp"] <= 3
    with pytest.raises(UserError, match=r"PRV accountant finds no noise .* try --accountant rdp"):
        account(PrivacyGoal(**goal))


@pytest.mark.parametrize(
    ("samples", "batch", "epsilon", "accountant", "physical"),
    [
        (64, 20, 6.0, "prv", None),  # 16 are expected, not 20
        (64, 16, 6.0, "prv", 3),  # draws are cut into passes, and each draw is one step
        (100, 7, 3.0, "rdp", 5),
        (64, 16, 0.05, "prv", 8),  # which Opacus's own precision cannot tell
    ],
)
def test_training_by_a_plan_ends_with_its_epsilon(samples, batch, epsilon, accountant, physical):
    goal = {"samples": samples, "logical_batch": batch, "epochs": 2, "epsilon": epsilon, "accountant": accountant}
    found = account(PrivacyGoal(**goal, delta=1e-3))
    assert found.expected_batch == samples // math.ceil(samples / batch)
    rounded = f"{found.expected_batch} samples are expected in a batch, not {batch}"
    assert (rounded in " ".join(found.notes)) == (found.expected_batch != batch)
    model = nn.Linear(3, 2)
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(samples, 3), torch.randint(2, (samples,))), batch_size=batch),
        noise_multiplier=found.noise_multiplier,
        max_grad_norm=1.0,
    )
    passes = (
        nullcontext(loader)
        if physical is None
        else BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
    )
    with passes as batches:
        for _ in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert sum(steps for *_, steps in engine.accountant.history) == found.steps
    assert optimizer.expected_batch_size == found.expected_batch
    options = {"eps_error": found.eps_error} if accountant == "prv" else {}
    spent = engine.accountant.get_epsilon(1e-3, **options)
    assert spent == pytest.approx(found.epsilon[accountant], rel=1e-9)
    assert spent <= epsilon


def test_the_epochs_that_epsilon_allows_are_found():
    goal = {"samples": 1000, "logical_batch": 100, "noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    found = account(PrivacyGoal(**goal, epsilon=4.0))
    assert found.epsilon["rdp"] <= 4.0
    longer = account(PrivacyGoal(**goal, epochs=(found.steps + found.steps // 200 + 2) / 10))
    assert longer.epsilon["rdp"] > 4.0


def test_an_epsilon_far_beyond_the_goal_is_not_asked_of_the_prv_accountant(monkeypatch):
    """Its memory grows with epsilon: 6,982 epochs took more than 20 GB, and the process was killed."""
    asked = accounting.epsilon_of

    def epsilon_of(noise, rate, steps, delta, accountant, *error):
        assert accountant == "rdp" or steps < 100
        return asked(noise, rate, steps, delta, accountant, *error)

    monkeypatch.setattr(accounting, "epsilon_of", epsilon_of)
    with pytest.raises(UserError, match=r"6982 epochs at noise multiplier 1 take more .* allows 6\.75 epochs"):
        account(PrivacyGoal(samples=1000, logical_batch=256, noise_multiplier=1.0, epsilon=8.0, steps=27_926))


def test_an_epsilon_that_allows_endless_training_is_said(monkeypatch):
    monkeypatch.setattr(accounting, "MOST_STEPS_ACCOUNTED", 2**8)
    goal = {"samples": 1000, "logical_batch": 100, "noise_multiplier": 50.0, "epsilon": 8.0}
    found = account(PrivacyGoal(**goal, accountant="rdp"))
    assert found.steps == 256
    assert "allows more than 256 steps" in " ".join(found.notes)


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
        ({"epsilon": 500.0, "epochs": 1}, "between 0.001 and 200, not 500: more protects nobody"),
        ({"epsilon": 1e-4, "epochs": 1}, "accountants cannot tell less"),
        ({"epsilon": 8.0, "epochs": 1e9}, "more than can be accounted for"),
        ({"epsilon": 0.005, "noise_multiplier": 1.0, "accountant": "prv"}, "takes more than epsilon 0.005: add noise"),
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

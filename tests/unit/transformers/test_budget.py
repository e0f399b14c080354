"""Steps that a target ε allows."""

from __future__ import annotations

import pytest
from opacus.accountants import create_accountant

from dpscope.transformers.records import epsilon_of, steps_left

TARGET = {"noise_multiplier": 2.0, "sample_rate": 0.1, "epsilon": 3.0, "delta": 1e-5}


@pytest.mark.parametrize("mechanism", ["rdp", "gdp"])
@pytest.mark.parametrize("spent", [0, 5])
def test_one_step_more_would_be_too_much(mechanism, spent):
    accountant = create_accountant(mechanism)
    accountant.history = [(2.0, 0.1, spent)] if spent else []
    left = steps_left(accountant, **TARGET)
    assert left > 0
    for steps, fits in ((left, True), (left + 1, False)):
        accountant.history = [(2.0, 0.1, spent + steps)]
        assert (accountant.get_epsilon(1e-5) <= 3.0) == fits


def test_a_spent_budget_allows_none():
    accountant = create_accountant("rdp")
    accountant.history = [(1.0, 0.1, 10_000)]
    assert steps_left(accountant, **TARGET) == 0
    assert steps_left(create_accountant("rdp"), **{**TARGET, "noise_multiplier": 0.0}) == 0


@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
def test_epsilon_is_the_accountants_own(mechanism):
    accountant = create_accountant(mechanism)
    accountant.history = [(1.5, 0.02, 300)] if mechanism == "gdp" else [(1.5, 0.02, 300), (0.9, 0.05, 7)]
    for delta in (1e-5, 1e-3):
        assert epsilon_of(accountant, delta) == pytest.approx(accountant.get_epsilon(delta=delta), rel=1e-12)

"""Privacy engines as their users call them, with Poisson loaders and accountants: Opacus's and flash clipping's."""

from __future__ import annotations

import re

import opacus
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import dpscope
from dpscope.flash import PrivacyEngine
from tests.unit.audit.engine_loops import DATA, loop_of


def audit(*arguments, **options):
    return dpscope.check_loop(loop_of(*arguments, **options), DataLoader(DATA, batch_size=4))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Secure RNG turned off")
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("engine", [opacus.PrivacyEngine, PrivacyEngine])
def test_an_engine_in_an_ordinary_loop_holds(engine, accountant):
    found = audit(engine, accountant=accountant)
    assert found.ok and found.accounting.verdict == "held", str(found)
    assert found.noise.untried == found.neighbours.untried == found.accounting.untried == []


def adversarial(model, x, y):
    attacked = x.clone().requires_grad_()
    (direction,) = torch.autograd.grad(F.cross_entropy(model(attacked), y, reduction="sum"), attacked)
    return F.cross_entropy(model(x + 0.1 * direction.sign()), y)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Secure RNG turned off")
def test_adversarial_training_with_opacus_is_a_breach_and_with_flash_it_holds():
    found = audit(opacus.PrivacyEngine, adversarial, poisson_sampling=False)
    assert found.breached, str(found)
    assert not audit(PrivacyEngine, adversarial).breached


def summed(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize("engine", [opacus.PrivacyEngine, PrivacyEngine])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Secure RNG turned off")
def test_a_summed_loss_taken_for_a_mean_is_a_breach_by_removing(engine):
    """The engine multiplies by the batch's own size, so that a sample that leaves changes the shares of all others."""
    found = audit(engine, summed)
    assert found.neighbours.verdict == "BREACH" and found.noise.verdict == "held"
    # Two trials are beyond their bound by almost as much; which of them speaks depends on the model's random weights.
    told = r"removing one of 6 (samples|copies of a sample), the noiseless sum moves by 1\.[67]"
    assert re.match(told, found.neighbours.faults[0])
    assert found.neighbours.faults[1].startswith("a sample's share depends on the batch's own size: ")

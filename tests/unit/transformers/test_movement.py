"""The first step: what should move moves, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, FlashEngine
from dpscope.transformers.steps import FirstStep


class Branches(nn.Module):
    """`skipped` holds the names of layers that the loss does not depend on."""

    def __init__(self, skipped=()):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.skipped = skipped

    def forward(self, x):
        x = self.frozen(x) + sum(getattr(self, name)(x) for name in ("first", "second") if name not in self.skipped)
        return x * torch.ones((), requires_grad=True)


def first_step(model, *, noise=1.0, disturb=None, trained=None, lr=0.1):
    engine = FlashEngine(model, max_grad_norm=1.0)
    sgd = torch.optim.SGD(trained or [p for p in model.parameters() if p.requires_grad], lr=lr)
    optimizer = DPFlashOptimizer(
        sgd, engine=engine, noise_multiplier=noise, max_grad_norm=1.0, expected_batch_size=3, fused=False
    )
    watch = FirstStep(optimizer)
    model(torch.randn(3, 4)).square().mean().backward()
    watch.see_backward()
    watch.begin()
    optimizer.step()
    if disturb is not None:
        disturb(model)
    return watch.end(samples=3)


def test_a_step_that_moves_what_it_should_is_passed():
    assert first_step(Branches())


def test_a_step_without_a_learning_rate_tells_nothing_yet():
    assert not first_step(Branches(), lr=0.0)


def test_a_frozen_parameter_that_moves_is_refused():
    def write(model):
        with torch.no_grad():
            model.frozen.bias += 1

    with pytest.raises(UserError, match=r"frozen\.bias changed in the first step but is frozen"):
        first_step(Branches(), disturb=write)


def test_training_on_noise_alone_is_refused():
    with pytest.raises(UserError, match="no backward pass that accumulates the parameters' gradients"):
        first_step(Branches(skipped=("first", "second")))


def test_a_part_that_the_loss_does_not_depend_on_is_warned_of():
    with pytest.warns(UserWarning, match=r"no gradient reached second\.bias, second\.weight"):
        first_step(Branches(skipped=("second",)))


def test_a_trained_parameter_that_stays_is_refused():
    model = Branches()
    with pytest.raises(UserError, match=r"second\.bias, second\.weight should be trained and did not change"):
        first_step(model, trained=list(model.first.parameters()))

"""A checkpoint around the whole model sees nothing of verification; a reentrant one is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, private_step, reference
from tests.unit.flash.sample_rows.verified_models import Mixture, RelativeBias, TiedByHand


class Counted:
    """A context of the user's around a checkpointed forward."""

    entered = 0

    def __enter__(self):
        Counted.entered += 1

    def __exit__(self, *error):
        pass


def small():
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Tanh(), nn.Linear(6, 2))


def around(**options):
    """Losses of a model that runs in a checkpoint, on rows that require a gradient as another layer's output does."""

    def losses(model, batch):
        x = batch["x"].clone().requires_grad_()
        answer = checkpoint(model, x, **options) if options else model(x)
        return answer.flatten(1).sin().mean(1)

    return losses


@pytest.mark.parametrize("make", [small, RelativeBias, Mixture, TiedByHand])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("determinism_check", ["default", "none"])
def test_a_checkpoint_around_the_model_sees_nothing_of_verification(make, early_stop, determinism_check):
    torch.manual_seed(0)
    model = make()
    batch = {"x": torch.randn(4, 5, 3) if make is Mixture else torch.randn(4, 6)}
    losses = around(
        use_reentrant=False,
        determinism_check=determinism_check,
        context_fn=lambda: (Counted(), Counted()),
    )
    truth, c = reference(model, batch, around())
    with FlashEngine(model, max_grad_norm=c) as engine, set_checkpoint_early_stop(early_stop):
        for _ in range(3):
            engine.zero_grad()
            Counted.entered = 0
            private_step(engine, batch, losses)
            assert Counted.entered == 2  # forward, and again in backward
            with engine.without_taps():
                assert_agrees(model, batch, around(), engine, truth, c)


class Scaled(nn.Module):
    """Mixes samples in a way that gradients do not show."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        h = self.layer(x)
        return h / h.detach().std()


@pytest.mark.parametrize("make", [small, Scaled])
def test_a_reentrant_checkpoint_around_the_model_is_refused(make):
    """Its forward pass cannot be seen: samples could mix, and micro-batches be taken for one."""
    batch = {"x": torch.randn(4, 6)}
    with FlashEngine(make(), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="use_reentrant=False"):
        private_step(engine, batch, around(use_reentrant=True))

"""Batches, losses and small models of the tests of verification."""

from __future__ import annotations

import torch
from torch import nn

from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, private_step, reference


def losses(model, batch):
    return model(batch["x"]).flatten(1).sin().mean(1)


def images(batch=4):
    return {"x": torch.randn(batch, 3, 6, 6)}


def rows(batch=4):
    return {"x": torch.randn(batch, 6)}


def head(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


@torch.no_grad()
def made(model, batch):
    model(batch["x"])
    return model


def two_steps(model, change, batch):
    """The second step's sums are exact though the model has changed after the first."""
    truth, c = None, 1.0
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, losses)
        with change(model):
            model.zero_grad()
            with engine.without_taps():
                truth, c = reference(model, batch, losses)
            engine.max_grad_norm = c
            private_step(engine, batch, losses)
            with engine.without_taps():
                assert_agrees(model, batch, losses, engine, truth, c)

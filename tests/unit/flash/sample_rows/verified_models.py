"""Batches, losses and small models of the tests of verification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class Router(nn.Module):
    """Gives out the scores of all tokens of all samples, in one list, beside its answer."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        tokens = x.reshape(-1, 3)
        scores = self.gate(tokens)
        weights, chosen = scores.softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            picked = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, picked, expert(tokens[picked]) * weights[picked, None])
        return out.reshape(x.shape), scores


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.last = Router(), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.router(x)[0])


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def forward(self, x):
        return F.linear(self.table(x.abs().mul(3).long().clamp(max=8)).tanh().mean(1), self.table.weight)


class Mixture(nn.Module):
    """Experts that are given the tokens routed to them, of any sample."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        tokens = x.reshape(-1, 3)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            picked = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, picked, expert(tokens[picked]) * weights[picked, None])
        return out.reshape(x.shape)


class RelativeBias(nn.Module):
    """Positions, not samples, go into the embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(12, 2), nn.Linear(6, 2)

    def forward(self, x):
        places = torch.arange(6)
        bias = self.table((places[:, None] - places).abs()).permute(2, 0, 1).sum(0)
        return self.last(x @ bias)

"""The last product of a block that runs again is left out where nothing reads it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.layers import linear
from tests.unit.flash.checkpointed_models import assert_sums, clipped, how, some_clipped, true_gradients


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, y):
        return y * self.scale


# What a block makes of x, of a layer of x and of what its last product gives. "read": the product is not left out.
TAILS = {
    "sum": lambda block, x, h, y: x + y,
    "sum in place": lambda block, x, h, y: y.add_(x),
    "dropout": lambda block, x, h, y: x + torch.native_dropout(y, 0.3, True)[0],
    "views and casts": lambda block, x, h, y: (x.double() + y.view(y.shape[0], -1).view_as(x)).float(),
    "product alone": lambda block, x, h, y: y,
    "activation, read": lambda block, x, h, y: x + F.gelu(y),
    "norm, read": lambda block, x, h, y: block.norm(x + y),
    "gate, read": lambda block, x, h, y: h * torch.sigmoid(y.detach()) + y,
    "parameter, read": lambda block, x, h, y: x + block.gate(y),
    "another product, read": lambda block, x, h, y: x + y @ torch.ones(6, 6),
    "clamp, read": lambda block, x, h, y: x + y.clamp(-100, 100),
}


class Block(nn.Module):
    def __init__(self, tail: str) -> None:
        super().__init__()
        self.tail = tail
        self.up, self.down, self.other = nn.Linear(6, 24), nn.Linear(24, 6), nn.Linear(6, 6)
        self.norm, self.gate = nn.LayerNorm(6), Gate()

    def forward(self, x):
        h = self.other(x)
        return TAILS[self.tail](self, x, h, self.down(F.gelu(self.up(x + h))))


class Model(nn.Module):
    """Two blocks, each in a checkpoint."""

    def __init__(self, tail: str, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.reentrant = nn.Linear(6, 6), nn.ModuleList([Block(tail), Block(tail)]), reentrant
        self.on = True

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x


def losses(model, x):
    return model(x).sin().sum((1, 2))


@pytest.fixture
def products(monkeypatch):
    """Widths of what layers' products give, as they are made."""
    made = []
    original = F.linear

    class Functions:
        @staticmethod
        def linear(x, weight, bias=None):
            made.append(len(weight))
            return original(x, weight, bias)

    monkeypatch.setattr(linear, "F", Functions)
    return made


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_the_last_product_is_left_out_where_no_value_of_it_is_read(tail, reentrant, products):
    model, x = Model(tail, reentrant), torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1))
    model.on = False
    gradients = true_gradients(model, x, losses)
    model.on, c = True, some_clipped(gradients)
    made = []
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(0)
            losses(model, x).mean().backward()
            products.clear()
            engine.finish()
            made.append(list(products))
            assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["recomputed"] * 2
    whole = made[0]
    assert whole == [6, 24, 6] * 2
    assert made[1] == made[2] == (whole if "read" in tail else [6, 24] * 2)


def test_samples_of_another_shape_are_looked_at_anew(products):
    model = Model("sum")
    with FlashEngine(model, max_grad_norm=0.1, memory_budget="lean") as engine:
        for length, expected in ((16, [6, 24, 6]), (16, [6, 24]), (8, [6, 24, 6]), (8, [6, 24])):
            model.zero_grad()
            losses(model, torch.randn(4, length, 6)).mean().backward()
            products.clear()
            engine.finish()
            assert products == 2 * expected


def test_a_block_that_decides_by_the_value_is_refused_and_never_summed_wrongly(monkeypatch):
    """No graph shows what Python reads; the gradients of the layers do."""

    def decide(block, x, h, y):
        return x + y if float(y.detach().abs().max()) > 0 else x - y

    monkeypatch.setitem(TAILS, "decision", decide)
    model, x = Model("decision"), torch.randn(4, 16, 6)
    with FlashEngine(model, max_grad_norm=0.1, memory_budget="lean") as engine:
        losses(model, x).mean().backward()
        engine.finish()
        model.zero_grad()
        losses(model, x).mean().backward()
        with pytest.raises(UserError, match="gave its layers other gradients or inputs"):
            engine.finish()
        model.zero_grad()
        losses(model, x).mean().backward()
        engine.finish()  # its product is made again

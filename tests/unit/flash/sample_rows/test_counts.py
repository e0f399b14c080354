"""How many samples there are is found in whatever holds them, or the caller is asked."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, private_step, reference
from tests.unit.flash.sample_models import B, D, T


class PerToken(nn.Module):
    """Every layer sees (B·T, d)."""

    def __init__(self, opened) -> None:
        super().__init__()
        self.layer, self.opened = nn.Linear(D, 3), opened

    def forward(self, batch) -> Tensor:
        x = self.opened(batch)
        return self.layer(x.flatten(0, 1)).view(len(x), -1)


@dataclass
class Pair:
    name: str
    x: Tensor


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass(slots=True)
class Slotted:
    x: Tensor


class SlottedByHand:
    __slots__ = ("unset", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.inner = {"deep": [x]}


HOLDERS = {
    "dataclass": (lambda x: Pair("a", x), lambda h: h.x),
    "frozen dataclass": (Frozen, lambda h: h.x),
    "dataclass with slots": (Slotted, lambda h: h.x),
    "slots": (SlottedByHand, lambda h: h.x),
    "UserDict": (lambda x: UserDict(x=x), lambda h: h["x"]),
    "object": (Plain, lambda h: h.inner["deep"][0]),
    "list": (lambda x: [{"x": x}], lambda h: h[0]["x"]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_the_batch_is_found_in_what_holds_it(holder):
    hold, opened = HOLDERS[holder]
    model = nn.Sequential(Opening(opened), nn.Linear(D, 3))
    x = torch.randn(B, 3, D)
    losses = lambda m, b: m(hold(b["x"])).sin().flatten(1).sum(1)  # noqa: E731
    truth, c = reference(model, {"x": x}, losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        private_step(engine, {"x": x}, losses)
    assert_agrees(model, {"x": x}, losses, engine, truth, c)


class Opening(nn.Module):
    def __init__(self, opened) -> None:
        super().__init__()
        self.opened = opened

    def forward(self, batch):
        return self.opened(batch)


def test_where_nothing_tells_the_number_of_samples_the_caller_is_asked():
    data = torch.randn(10, 3, D)
    model = PerToken(lambda index: data[index])
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=r"number of samples.*batch_size_of"):
        model([1, 2, 3])
    with FlashEngine(model, max_grad_norm=1.0, batch_size_of=lambda args, kwargs: len(args[0])) as engine:
        model([1, 2, 3]).sum().backward()
        engine.finish()
        assert engine.samples == 3


def test_parts_called_without_the_model_are_refused_where_nothing_tells():
    model = PerToken(lambda x: x)
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=r"^layer was called outside"):
        model.layer(torch.randn(B * T, D))

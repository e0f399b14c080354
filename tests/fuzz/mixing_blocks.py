"""Blocks in which samples mix: from the first step on, later, at random, or through what is kept between steps.

`armed` says when: a block that is not armed treats samples apart. `found` says when the engine has to refuse it:

    step    in the first step whose samples mix
    look    at the next look (docs/guarantees.md): what switches the mixing on is out of the engine's sight
    count   in the first step, unless what comes after hides it, so that the step is exact
    random  with a probability: each look draws random numbers as the model does
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.blocks import Block, Sizes

MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: 0.7 * x + 0.3 * x.roll(1, 0),
    "minus mean": lambda x: x - x.mean(0),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "sorted": lambda x: x[x.flatten(1).norm(dim=1).argsort()],
    "over the largest": lambda x: x / x.abs().max().clamp(min=1e-3),
    "softmax over samples": lambda x: x.softmax(0),
    "running sum": lambda x: x.cumsum(0),
    "flipped": lambda x: x.flip(0),
    "attention": lambda x: x + torch.tensordot((x.flatten(1) @ x.flatten(1).T).softmax(-1), x, 1),
}


class Mixer(NamedTuple):
    """A block, what switches its mixing on, and when that is to be found. `call`: arguments of the model that do."""

    block: nn.Module
    arm: Callable[[], Any]
    found: str
    call: dict[str, Any] = {}  # noqa: RUF012
    at_once: bool = False  # it mixes from the first step on


class Conditional(nn.Module):
    """Mixes where `when` of itself says so."""

    def __init__(self, width: int, effect: Callable[[Tensor], Tensor], when: Callable[[Any], bool]) -> None:
        super().__init__()
        self.inner, self.effect, self.when = nn.Linear(width, width), effect, when
        self.mixing, self.calls = False, 0
        self.options = {"mixing": False}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(self.effect(x) if self.when(self) else x)


def _set(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(target, name, value)


def _from_the_start(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    return Mixer(Conditional(width, effect, lambda block: True), lambda: None, "step", at_once=True)


def _by_attribute(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    block = Conditional(width, effect, lambda block: block.mixing)
    return Mixer(block, _set(block, "mixing", True), "step")


def _by_dictionary(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    block = Conditional(width, effect, lambda block: block.options["mixing"])
    return Mixer(block, lambda: block.options.update(mixing=True), "step")


def _by_training(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    """Statistics of the batch in training mode alone."""
    block = Conditional(width, effect, lambda block: block.training)
    block.eval()
    return Mixer(block, block.train, "step")


def _by_global(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    switch = {"on": False}

    def when(block: Any) -> bool:
        return switch["on"]

    return Mixer(Conditional(width, effect, when), lambda: switch.update(on=True), "look")


def _by_argument(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    """The model is called in another way, and that way mixes."""
    flag = {"on": False}
    block = Conditional(width, effect, lambda block: flag["on"])

    def arm() -> None:
        flag["on"] = True

    return Mixer(block, arm, "step", call={"scale": 1.25})


def _at_random(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    draw = rng.choice(
        [lambda: bool(torch.rand(()) < 0.5), lambda: random.random() < 0.5, lambda: bool(np.random.rand() < 0.5)]
    )
    return Mixer(Conditional(width, effect, lambda block: draw()), lambda: None, "random", at_once=True)


def _carried(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    """What one step's samples leave is read in the next."""
    where = rng.choice(["attribute", "list", "dict", "buffer", "object", "outside"])
    outside: list[Tensor] = []

    def run(block: Any, x: Tensor) -> Tensor:
        store = outside if where == "outside" else block.items
        before = {
            "attribute": block.last,
            "list": store[-1] if store else None,
            "outside": store[-1] if store else None,
            "dict": block.table.get("x"),
            "buffer": block.mean,
            "object": getattr(block.holder, "x", None),
        }[where]
        now = x.detach().flatten(0, -2).mean(0)
        if where == "attribute":
            block.last = now
        elif where in ("list", "outside"):
            store.append(now)
        elif where == "dict":
            block.table["x"] = now
        elif where == "object":
            block.holder.x = now
        else:
            block.mean = 0.5 * block.mean.to(now) + 0.5 * now
        return block.inner(x if before is None else x + before.to(x))

    block = Block(run, inner=nn.Linear(width, width), mean=torch.zeros(width))
    block.last, block.items, block.table = None, [], {}
    block.holder = type("Holder", (), {})()
    return Mixer(block, lambda: None, "step", at_once=True)


def _divided(rng: random.Random, width: int, effect: Callable[[Tensor], Tensor]) -> Mixer:
    """Divides by the number of samples."""
    block = Block(lambda block, x: block.inner(x / len(x)).tanh(), inner=nn.Linear(width, width))
    return Mixer(block, lambda: None, "count", at_once=True)


MIXERS: dict[str, Callable[[random.Random, int, Callable[[Tensor], Tensor]], Mixer]] = {
    "from the start": _from_the_start,
    "by an attribute": _by_attribute,
    "by a dictionary": _by_dictionary,
    "by training mode": _by_training,
    "by a global": _by_global,
    "by an argument": _by_argument,
    "at random": _at_random,
    "carried": _carried,
    "divided by the batch size": _divided,
}


def make_mixer(rng: random.Random, sizes: Sizes) -> tuple[str, Mixer]:
    name, effect = rng.choice(list(MIXERS)), rng.choice(list(MIXES))
    return f"{effect}, {name}", MIXERS[name](rng, sizes.width, MIXES[effect])

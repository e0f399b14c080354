"""What a call was given: numbers, options and collections tell one way through a forward from another."""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.sample_rows import verification
from dpscope.flash.torch_side.arguments import leaves_in, replace_leaves, signature
from tests.torch_here import takes_compiled


class Way(enum.Enum):
    PLAIN = 0
    MIXED = 1


TOLD_APART = [
    (0, 1),
    (0, False),
    (1, 1.0),
    (0.5, 0.25),
    (1j, 2j),
    ("a", "b"),
    (b"a", b"b"),
    (None, 0),
    (numpy.int64(0), numpy.int64(1)),
    (numpy.float32(0), numpy.float32(1)),
    ({"x"}, {"y"}),
    (frozenset({1}), frozenset()),
    (range(2), range(3)),
    (slice(1), slice(2)),
    (Way.PLAIN, Way.MIXED),
    ([1, 2], [1, 3]),
    ({"k": 1}, {"k": 2}),
    (torch.float32, torch.bfloat16),
    (torch.ones(2), torch.ones(2, 2)),
    (torch.ones(2), torch.ones(2, dtype=torch.long)),
]


@pytest.mark.parametrize(("one", "other"), TOLD_APART, ids=repr)
def test_calls_that_may_go_another_way_have_another_signature(one, other):
    assert signature(((one,), {})) != signature(((other,), {}))
    assert signature(((one,), {})) == signature(((one,), {}))


def test_sizes_and_values_of_tensors_are_not_told_and_nan_is_itself():
    assert signature(torch.zeros(2, 3)) == signature(torch.ones(5, 4))
    assert signature(math.nan) == signature(float("nan"))
    assert signature({3, 1, 2}) == signature({2, 3, 1})


def test_tensors_in_a_set_are_found_and_replaced():
    tensor = torch.zeros(2)
    assert leaves_in({tensor}) == [tensor]
    (new,) = replace_leaves({tensor}, lambda leaf: leaf + 1)
    assert torch.equal(new, torch.ones(2))


class Switched(nn.Module):
    """Mixes samples where it is told to by an argument."""

    def __init__(self, mixes: Callable[[Any], bool]) -> None:
        super().__init__()
        self.mixes = mixes
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, how: Any) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + 3 * h.mean(0) if self.mixes(how) else h)


def train(engine: FlashEngine, model: Any, how: Any) -> None:
    engine.zero_grad()
    model(torch.randn(8, 6), how).square().sum(1).mean().backward()
    engine.finish()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=takes_compiled)])
@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 1), (0.0, 1.0), (numpy.int64(0), numpy.int64(1)), ("no", "mix"), ({"a"}, {"mix"}), ({"k": [0]}, {"k": [1]})],
    ids=repr,
)
def test_an_argument_that_makes_samples_mix_later_is_refused(before, after, compiled):
    model = Switched(lambda how: signature(how) == signature(after))
    called = torch.compile(model, backend="eager") if compiled else model
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        train(engine, called, before)
        train(engine, called, before)
        with pytest.raises(UserError):
            train(engine, called, after)


def test_numbers_that_change_at_every_step_are_tried_out_and_warned_of_once(monkeypatch):
    monkeypatch.setattr(verification, "MOST_WAYS", 4)
    model = Switched(lambda how: how == 20)
    with FlashEngine(model, max_grad_norm=0.1) as engine, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(20):
            train(engine, model, number)
        with pytest.raises(UserError):
            train(engine, model, 20)
    assert sum("give it numbers that change from step to step as tensors" in str(each.message) for each in seen) == 1

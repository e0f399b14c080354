"""A model may be told how many samples it is given; a number that is as large by chance stays what it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_next_step_is_exact, private_step


class Told(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(6, 6), nn.Linear(6, 2), use
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x, *numbers):
        return self.use(self, x, *numbers)


def viewed(model, x, number):
    h = model.first(x.reshape(number * 5, 6)).tanh() * model.scale
    return model.last(h.view(number, 5, 6).mean(1))


def expanded(model, x, number):
    return model.last((model.first(x).tanh() * model.scale.expand(number, 1, -1)).mean(1))


def one_by_one(model, x, number):
    rows = [model.first(x[b]).tanh().mean(0) * model.scale for b in range(int(number))]
    return model.last(torch.stack(rows).view(number, -1))


def of_the_first(model, x, number):
    """Reads so many positions, whatever the number of samples is."""
    return model.last((model.first(x[:, :number]).tanh() * model.scale).mean(1))


def divided(model, x, number):
    return of_the_first(model, x, 5) / number


def viewed_and_divided(model, x, number):
    return viewed(model, x, number) / number


def losses(number):
    return lambda model, batch: model(batch["x"], number(batch["x"])).sin().mean(1)


SAMPLES = {"int": len, "tensor": lambda x: torch.tensor(len(x))}


@pytest.mark.parametrize("number", SAMPLES)
@pytest.mark.parametrize("use", [viewed, expanded, one_by_one])
def test_a_model_that_is_told_the_number_of_samples_is_exact(use, number):
    assert_steps_are_exact(Told(use), losses(SAMPLES[number]))


def test_a_number_that_is_as_large_as_the_batch_by_chance_stays():
    assert_steps_are_exact(Told(of_the_first), losses(lambda x: 4))


def assert_steps_are_exact(model, losses, *, sizes=(4, 5, 4, 1), positions=5):
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in sizes:
            assert_next_step_is_exact(engine, {"x": torch.randn(size, positions, 6)}, losses)
        return engine.runs_by_sample()


DIVISORS = {
    **SAMPLES,
    "float": lambda x: float(len(x)),
    "numpy": lambda x: np.float32(len(x)),
    "tensor of a float": lambda x: torch.tensor(float(len(x))),
}


@pytest.mark.parametrize("number", DIVISORS)
def test_a_division_by_the_number_that_a_model_is_told_is_refused_once_it_changes(number):
    with FlashEngine(Told(divided), max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(4, 5, 6)}, losses(DIVISORS[number]))
        with pytest.raises(UserError, match="depends on how many samples"):
            private_step(engine, {"x": torch.randn(5, 5, 6)}, losses(DIVISORS[number]))


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1, 4), (1, 1, 3)])
def test_a_batch_of_one_sample_is_evidence_of_a_division(sizes):
    with FlashEngine(Told(divided), max_grad_norm=1.0) as engine:
        for size in sizes[:-1]:
            private_step(engine, {"x": torch.randn(size, 5, 6)}, losses(len))
        with pytest.raises(UserError, match="depends on how many samples"):
            private_step(engine, {"x": torch.randn(sizes[-1], 5, 6)}, losses(len))


def in_heads(model, x, number, heads):
    h = (model.first(x).tanh() * model.scale).view(number, -1, heads, 6 // heads)
    return model.last(h.mean(1).reshape(number, 6))


def of_shape(model, x, shape):
    return model.last((model.first(x.reshape(shape[0] * shape[1], 6)).tanh() * model.scale).view(*shape, 6).mean(1))


class Inside(nn.Module):
    """Runs sample by sample, because of complex numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x, number, heads):
        return (
            torch.fft.irfft(torch.fft.rfft(x * self.weight) * self.weight[:4], 6)
            .view(number, -1, heads, 6 // heads)
            .sin()
            .flatten(2)
        )


class AroundInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.last = Inside(), nn.Linear(6, 2)

    def forward(self, x, number, heads):
        return self.last(self.inside(x, number, heads).mean(1))


@pytest.mark.parametrize("make", [lambda: Told(in_heads), AroundInside], ids=["layers", "sample by sample"])
@pytest.mark.parametrize("sizes", [(3, 4, 3), (4, 3, 1)])
def test_another_number_that_is_as_large_as_the_batch_stays(make, sizes):
    model = make()
    by = lambda model, batch: model(batch["x"], len(batch["x"]), 3).sin().mean(1)  # noqa: E731
    by_sample = assert_steps_are_exact(model, by, sizes=sizes)
    assert by_sample == isinstance(model, AroundInside)


@pytest.mark.parametrize("kind", [torch.Size, tuple, list])
@pytest.mark.parametrize("positions", [5, 7])
def test_a_shape_among_the_arguments_may_have_as_many_positions_as_samples(kind, positions):
    by = lambda model, batch: model(batch["x"], kind(batch["x"].shape[:2])).sin().mean(1)  # noqa: E731
    assert_steps_are_exact(Told(of_shape), by, sizes=(4, 5, 5, 4, 5), positions=positions)


def test_positions_that_change_together_with_the_batch_stay():
    by = lambda model, batch: model(batch["x"], batch["x"].shape[1]).sin().mean(1)  # noqa: E731
    with FlashEngine(Told(lambda model, x, number: of_shape(model, x, (len(x), number))), max_grad_norm=1.0) as engine:
        for size in (3, 4, 5):
            engine.zero_grad()
            private_step(engine, {"x": torch.randn(size, size, 6)}, by)


@pytest.mark.parametrize("sizes", [(4, 0, 5), (0, 4, 0)])
@pytest.mark.parametrize("use", [viewed, one_by_one])
def test_an_empty_batch_is_told_that_it_has_no_samples(use, sizes):
    with FlashEngine(Told(use), max_grad_norm=1.0) as engine:
        for size in sizes:
            engine.zero_grad()
            private_step(engine, {"x": torch.randn(size, 5, 6)}, losses(len))
            assert size or all(not p.grad.any() for p in engine.model.parameters())


def test_a_division_by_a_number_that_must_be_that_of_samples_is_refused_in_the_first_step():
    refused = pytest.raises(UserError, match="depends on how many samples")
    with FlashEngine(Told(viewed_and_divided), max_grad_norm=1.0) as engine, refused:
        private_step(engine, {"x": torch.randn(4, 5, 6)}, losses(len))

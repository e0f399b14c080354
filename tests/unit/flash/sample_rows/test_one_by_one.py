"""Models that take gradients themselves, or give their layers one sample after the other, run sample by sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, jvp, vmap

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_exact, private_step
from tests.unit.flash.sample_rows.verified_models import losses, rows


class Model(nn.Module):
    """Two layers and a parameter, and a forward that uses them as it is told."""

    def __init__(self, run):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale, self.run = nn.Parameter(torch.rand(6) + 0.5), run

    def forward(self, x):
        return self.run(self, x)

    def inner(self, x):
        return self.second(self.first(x).tanh())

    def end(self, h):
        return self.last(h * self.scale)


def force(model, x):
    """The gradient of an energy, which is trained on."""
    x = x.detach().requires_grad_()
    return model.end(torch.autograd.grad(model.inner(x).sin().sum(), x, create_graph=True)[0])


def inner_step(model, x):
    """Each sample takes a step of its own first."""

    def stepped(row):
        (gradient,) = torch.autograd.grad(
            F.linear(row, model.first.weight).sin().sum(), model.first.weight, create_graph=True
        )
        return F.linear(row, model.first.weight - 0.1 * gradient)

    return model.end(torch.cat([stepped(x[b : b + 1]) for b in range(len(x))]))


def inner_step_of_func(model, x):
    def stepped(row):
        gradient = grad(lambda weight: F.linear(row, weight).sin().sum())(model.first.weight)
        return F.linear(row, model.first.weight - 0.1 * gradient)

    return model.end(vmap(stepped)(x))


def detached_force(model, x):
    x = x.detach().requires_grad_()
    return model.end(model.second(x) * torch.autograd.grad(model.first(x).tanh().sum(), x)[0])


def jvp_of_layers(model, x):
    value, tangent = jvp(model.inner, (x,), (torch.ones_like(x),))
    return model.end(value * tangent)


TAKE_GRADIENTS = {
    "autograd.grad": force,
    "autograd.grad, detached": detached_force,
    "autograd.grad of a weight": inner_step,
    "func.grad": lambda model, x: model.end(grad(lambda v: model.inner(v).sin().sum())(x)),
    "func.grad of each": lambda model, x: model.end(vmap(grad(lambda v: model.inner(v).sin().sum()))(x)),
    "func.grad of a weight": inner_step_of_func,
    "func.grad of the data": lambda model, x: model.end(model.inner(x) * vmap(grad(lambda v: v.sin().sum()))(x)),
    "jacrev": lambda model, x: model.end(vmap(jacrev(model.inner))(x).sum(-1)),
    "jvp": jvp_of_layers,
    "vmap": lambda model, x: model.end(vmap(model.inner)(x)),
}
ONE_BY_ONE = {
    "rows": lambda model, x: torch.stack([model.end(model.inner(row)) for row in x]),
    "numbers": lambda model, x: torch.stack([model.end(model.inner(x[b])) for b in range(len(x))]),
    "slices": lambda model, x: torch.cat([model.end(model.inner(x[b : b + 1])) for b in range(len(x))]),
    "a part of it": lambda model, x: model.end(torch.stack([model.inner(row) for row in x])),
    "as data tell": lambda model, x: torch.stack(
        [model.end(model.inner(row) if row.sum() > 0 else model.first(row)) for row in x]
    ),
    "normalised": lambda model, x: torch.stack([model.end((row - row.mean()) / row.std()) for row in model.first(x)]),
}


@pytest.mark.parametrize("how", TAKE_GRADIENTS)
def test_a_model_that_takes_gradients_itself_is_exact(how):
    assert_exact(Model(TAKE_GRADIENTS[how]).double(), {"x": rows()["x"].double()}, losses)


@pytest.mark.parametrize("how", ONE_BY_ONE)
def test_a_model_that_gives_its_layers_one_sample_after_the_other_is_exact(how):
    model = Model(ONE_BY_ONE[how])
    assert_exact(model, rows(), losses)
    model.zero_grad()
    assert_exact(model, rows(5), losses)


def test_a_gradient_of_all_samples_together_mixes_them():
    def stepped(model, x):
        (gradient,) = torch.autograd.grad(
            F.linear(x, model.first.weight).sin().sum(), model.first.weight, create_graph=True
        )
        return model.end(F.linear(x, model.first.weight - 0.1 * gradient))

    with FlashEngine(Model(stepped), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="samples mix"):
        private_step(engine, rows(), losses)


def test_create_graph_is_refused_after_forward():
    model = nn.Linear(6, 3)
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="create_graph=True"):
        losses(model, rows()).sum().backward(create_graph=True)


class RandomForce(nn.Module):
    """Takes gradients itself, and draws other random numbers sample by sample than for a batch."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 8)), nn.Linear(6, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = ((x @ self.weight).tanh() * torch.randn(len(x), 8)).sum()
        return self.last(torch.autograd.grad(energy, x, create_graph=True)[0])


def test_a_module_that_takes_gradients_and_draws_random_numbers_is_trained():
    model = nn.Sequential(nn.Linear(6, 6), RandomForce())
    with FlashEngine(model, max_grad_norm=1e-3) as engine:
        private_step(engine, rows(), losses)
        assert engine.runs_by_sample()
        assert 0 < float(model[1].weight.grad.norm()) <= len(rows()["x"]) * 1e-3 * (1 + 1e-5)


class OwnForce(nn.Module):
    """The whole model takes gradients itself, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 8)), nn.Linear(6, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.last(torch.autograd.grad((x @ self.weight).tanh().sum(), x, create_graph=True)[0])


def test_a_model_that_takes_gradients_with_a_parameter_of_its_own_is_exact():
    assert_exact(OwnForce().double(), {"x": rows()["x"].double()}, losses)

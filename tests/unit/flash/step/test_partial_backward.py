"""Backward passes that do not ask for the parameters' gradients leave nothing; those that ask for some are refused."""

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, reference


class Gated(nn.Module):
    """Layers of several families, and a module the engine knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.gate = Gate()

    def forward(self, x):
        return self.last(self.gate(self.norm(self.first(x)).tanh()))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return x * self.scale


def losses(model, batch):
    return model(batch["x"]).sin().sum(1)


def gradient_of_the_input(model, x, how):
    x = x.clone().requires_grad_()
    loss = losses(model, {"x": x}).mean()
    if how == "grad":
        return torch.autograd.grad(loss, x)[0]
    loss.backward(inputs=[x])
    return x.grad


@pytest.mark.parametrize("how", ["grad", "backward(inputs=)"])
@pytest.mark.parametrize("steps", [1, 3])
def test_adversarial_examples_leave_no_share_of_their_own(how, steps):
    model, x = Gated(), torch.randn(4, 5)
    attacked = {"x": x + 0.1 * gradient_of_the_input(model, x, how).sign()}
    truth, c = reference(model, attacked, losses)
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=c) as engine:
        for _ in range(steps):
            adversarial = x + 0.1 * gradient_of_the_input(model, x, how).sign()
            assert not engine.pending
        losses(model, {"x": adversarial}).mean().backward()
        engine.finish()
    assert_agrees(model, attacked, losses, engine, truth, c)


def test_a_backward_pass_after_one_for_the_input_of_the_same_graph_counts_once():
    model, batch = Gated(), {"x": torch.randn(4, 5, requires_grad=True)}
    truth, c = reference(model, {"x": batch["x"].detach()}, losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        loss = losses(model, batch).mean()
        torch.autograd.grad(loss, batch["x"], retain_graph=True)
        loss.backward()
        engine.finish()
    assert_agrees(model, {"x": batch["x"].detach()}, losses, engine, truth, c)


def test_a_saliency_map_may_be_taken_of_a_graph_that_was_summed():
    model, x = Gated(), torch.randn(4, 5, requires_grad=True)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        loss = losses(model, {"x": x}).mean()
        loss.backward(retain_graph=True)
        engine.finish()
        assert torch.equal(torch.autograd.grad(loss, x)[0], x.grad)
        assert not engine.pending


def test_the_same_backward_twice_is_twice_the_loss():
    model, batch = Gated(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, lambda m, b: 2 * losses(m, b))
    with FlashEngine(model, max_grad_norm=c) as engine:
        loss = losses(model, batch).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        engine.finish()
    assert_agrees(model, batch, lambda m, b: 2 * losses(m, b), engine, truth, c)


def test_gradients_of_gradients_are_refused_for_the_input_too():
    model, x = Gated(), torch.randn(4, 5, requires_grad=True)
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="create_graph"):
        torch.autograd.grad(losses(model, {"x": x}).sum(), x, create_graph=True)


@pytest.mark.parametrize("how", ["backward(inputs=)", "grad"])
def test_asking_for_some_parameters_alone_is_refused_where_they_are_summed(how):
    model, x = Gated(), torch.randn(4, 5)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        loss = losses(model, {"x": x}).mean()
        if how == "grad":
            with pytest.raises(RuntimeError):  # torch's own: the parameters are not in the graph
                torch.autograd.grad(loss, list(model.parameters()))
        else:
            loss.backward(inputs=list(model.parameters()))
        with pytest.raises(UserError, match=r"4 samples.*no backward pass.*inputs="):
            engine.finish()
        model.zero_grad()
        engine.finish()  # the forward pass is forgotten
        assert all(p.grad.count_nonzero() == 0 for p in model.parameters())

"""Gradients that are missing, frozen, empty, or from elsewhere."""

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from tests.unit.flash.agreement import (
    REDUCTIONS,
    assert_agrees,
    one_loss,
    private_step,
    reference,
)
from tests.unit.flash.flash_models import Decoder, sine_losses, token_batch, token_losses
from tests.unit.flash.small_models import gradients, mlp


def test_requires_grad_may_be_switched_between_steps():
    model, batch = Decoder(), token_batch(4, 6)
    truth_all, c = reference(model, batch, token_losses)
    engine = FlashEngine(model, max_grad_norm=c)
    for frozen in (["head", "blocks.0.mlp"], [], ["tokens", "positions", "norm"]):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(name.startswith(part) for part in frozen))
            parameter.grad = None
        truth = run_oracle(model, batch, one_loss(token_losses), max_grad_norm=c, dtype=torch.float64)
        private_step(engine, batch, token_losses)
        assert_agrees(model, batch, token_losses, engine, truth, c)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == any(name.startswith(part) for part in frozen)
    engine.detach()
    assert len(truth_all.clipped_sums) > len(truth.clipped_sums)


def test_frozen_parameters_that_cannot_require_a_gradient_are_left_alone():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.ones(3, 5, dtype=torch.int8), requires_grad=False)
            with torch.inference_mode():
                self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x @ self.codes.to(x.dtype).t() * self.scale.clone())

    model, x = Quantised(), torch.randn(4, 5)
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        model(x).sin().sum().backward()
        engine.finish()
        assert model.head.weight.grad.any()
    assert model.codes.grad is None


def test_trainable_parameters_that_nothing_reached_get_zeros():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].unused = nn.Linear(3, 2)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(2, 3)).sum().backward()
        engine.finish()
    assert model[0].unused.weight.grad.count_nonzero() == 0
    assert model[0].weight.grad.count_nonzero() > 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_batch_gives_zeros_and_adds_nothing(reduction):
    model = Decoder()
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction=reduction) as engine:
        private_step(engine, token_batch(0, 6), token_losses)
        assert engine.samples == 0
        assert engine.norms.shape == (0,)
        assert all(total.count_nonzero() == 0 and total.isfinite().all() for total in gradients(model).values())
        private_step(engine, token_batch(3, 6), token_losses)
        before = gradients(model)
        private_step(engine, token_batch(0, 6), token_losses)
        assert engine.samples == 3
    assert all(torch.equal(before[name], total) for name, total in gradients(model).items())


def test_finish_without_a_backward_gives_zeros():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        engine.finish()
    assert all(total.count_nonzero() == 0 for total in gradients(model).values())


def test_a_gradient_from_elsewhere_is_not_added_to():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)  # its own are
        model[3].weight.grad = model[3].weight.grad * 100
        with pytest.raises(UserError, match=r"3\.weight\.grad.*zero_grad"):
            private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)
        model.zero_grad()
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)
        for parameter in model.parameters():
            parameter.grad.zero_()  # zero_grad(set_to_none=False)
        private_step(engine, {"x": torch.randn(4, 5)}, sine_losses)


def test_a_parameter_used_outside_its_module_is_refused_and_its_gradient_thrown_away():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0):
        loss = model(torch.randn(4, 5)).sum() + 0.1 * model[3].weight.square().sum()
        with pytest.raises(UserError, match=r"3\.weight received an ordinary, unclipped gradient"):
            loss.backward()
        assert model[3].weight.grad is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_second_order_gradients_are_refused():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="create_graph"):
        model(torch.randn(4, 5)).sin().sum().backward(create_graph=True)


def test_a_batch_overwritten_before_finish_is_an_error_and_not_a_wrong_norm():
    model, x = mlp(), torch.randn(4, 5)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(x).sum().backward()
        x.copy_(torch.randn(4, 5))
        with pytest.raises(UserError, match=r"0\.weight was changed in place"):
            engine.finish()

"""The oracle itself, against gradients written by hand."""

import torch
from torch import nn

from dpscope.flash import FlashEngine, run_oracle


def squared_error(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum()


def line() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    return model


def test_norms_factors_and_sum_are_those_of_the_hand_written_gradient():
    x = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.1, 0.0]])
    y = torch.zeros(3, 1)
    gradients = 2 * (x @ torch.tensor([1.0, -2.0]))[:, None] * x  # d/dw (w·x)² = 2 (w·x) x
    result = run_oracle(line(), {"x": x, "y": y}, squared_error, max_grad_norm=2.0)
    norms = gradients.norm(dim=1).double()
    torch.testing.assert_close(result.norms, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.factors, (2.0 / norms).clamp(max=1), rtol=1e-6, atol=0)
    expected = (result.factors.float()[:, None] * gradients).sum(0, keepdim=True)
    torch.testing.assert_close(result.clipped_sums["weight"], expected)


def test_a_sample_that_is_not_finite_has_no_share():
    x = torch.tensor([[1.0, 0.0], [float("inf"), 0.0], [float("nan"), 0.0]])
    result = run_oracle(line(), {"x": x, "y": torch.zeros(3, 1)}, squared_error, max_grad_norm=1.0)
    assert result.factors.tolist() == [0.5, 0.0, 0.0]
    assert result.clipped_sums["weight"].tolist() == [[1.0, 0.0]]


def test_an_empty_batch_gives_zeros():
    batch = {"x": torch.zeros(0, 2), "y": torch.zeros(0, 1)}
    result = run_oracle(line(), batch, squared_error, max_grad_norm=1.0)
    assert result.norms.shape == (0,)
    assert result.clipped_sums["weight"].tolist() == [[0.0, 0.0]]


def test_frozen_parameters_are_left_out_and_an_attached_engine_is_not_asked():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    batch = {"x": torch.randn(3, 2), "y": torch.zeros(3, 1)}
    free = run_oracle(model, batch, squared_error, max_grad_norm=0.1)
    with FlashEngine(model, max_grad_norm=0.1):
        tapped = run_oracle(model, batch, squared_error, max_grad_norm=0.1)
    assert set(free.clipped_sums) == {"0.bias", "1.weight", "1.bias"}
    assert torch.equal(free.norms, tapped.norms)
    assert all(parameter.grad is None for parameter in model.parameters())

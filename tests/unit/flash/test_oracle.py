"""The oracle itself, against gradients written by hand."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.oracle import gradients_of, per_sample_gradients


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


class Checkpointed(nn.Module):
    """The whole model in a checkpoint, with one more inside it; `kind` is use_reentrant, None for no checkpoint."""

    def __init__(self, kind: bool | None) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def run(self, function, x):
        return function(x) if self.kind is None else checkpoint(function, x, use_reentrant=self.kind)

    def forward(self, x):
        return self.run(lambda h: self.second(torch.tanh(self.run(self.first, h))), x)


def checkpointed_like(model: Checkpointed, kind: bool) -> Checkpointed:
    same = Checkpointed(kind)
    same.load_state_dict(model.state_dict())
    return same


def test_gradients_inside_checkpoints_of_either_kind_are_those_without():
    plain = Checkpointed(None)
    batch = {"x": torch.randn(3, 2, requires_grad=True), "y": torch.zeros(3, 1)}
    expected = run_oracle(plain, batch, squared_error, max_grad_norm=0.1)
    assert all(float(total.norm()) > 0 for total in expected.clipped_sums.values())
    for kind in (True, False):
        found = run_oracle(checkpointed_like(plain, kind), batch, squared_error, max_grad_norm=0.1)
        torch.testing.assert_close(found.norms, expected.norms)
        torch.testing.assert_close(found.clipped_sums, expected.clipped_sums)


def test_gradients_that_tensors_have_already_stay_as_they_were():
    """The model's, the batch's, and those of tensors that only the loss knows."""
    model, scale = Checkpointed(True), torch.tensor(2.0, requires_grad=True)
    x = torch.randn(3, 2, requires_grad=True)
    held = [model.first.weight, x, scale]
    before = [torch.randn_like(tensor) for tensor in held]
    for tensor, gradient in zip(held, before, strict=True):
        tensor.grad = gradient
    kept = [gradient.clone() for gradient in before]
    samples = list(per_sample_gradients(model, x, lambda m, b: (scale * m(b)).square().sum()))
    assert all(float(found["first.weight"].norm()) > 0 for found in samples)
    assert all(tensor.grad is gradient for tensor, gradient in zip(held, before, strict=True))
    assert all(map(torch.equal, before, kept))
    assert model.second.weight.grad is None


def test_gradients_that_tensors_have_already_stay_as_they_were_where_backward_fails():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("broken")

    w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    w.grad = torch.full((2,), 3.0)
    try:
        gradients_of((Broken.apply(w) * v).sum(), [w, v])
    except RuntimeError as error:
        assert "broken" in str(error)
    assert w.grad.tolist() == [3.0, 3.0] and v.grad is None

"""What reaches the parameters is clipped and noised, whatever else happened."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from tests.unit.flash.private_training import (
    CLASSES,
    clipped_mean,
    make_loader,
    make_model,
    make_private,
    moved,
    sgd,
    step,
)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_from_before_make_private_are_not_applied(fused: bool) -> None:
    model = make_model()
    original = sgd(model)
    x, y = next(iter(make_loader()))
    (1000 * F.cross_entropy(model(x), y)).backward()
    private, optimizer, _ = make_private(model, original, fused=fused)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(private(x), y).backward()
    optimizer.step()
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_put_into_grad_by_hand_are_ignored_with_a_warning(fused: bool) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    x, y = next(iter(loader))
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(private(x), y).backward()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.warns(UserWarning, match=r"0\.weight\.grad was set.*ignored.*Remove clip_grad_norm_"):
        optimizer.step()
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def _clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(100)


def _drop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("change", [_clip_norm, _scale, _drop])
def test_what_a_loop_does_to_grad_between_micro_batches_changes_nothing(change, fused: bool) -> None:
    def trained(change) -> list[torch.Tensor]:
        model = make_model()
        private, optimizer, loader = make_private(model, sgd(model), fused=fused)
        x, y = next(iter(loader))
        for part in (slice(0, 8), slice(8, 16)):
            F.cross_entropy(private(x[part]), y[part]).backward()
            change(model)
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for got, expected in zip(trained(change), trained(lambda model: None), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_after_detach_is_refused(fused: bool) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    optimizer.engine.detach()
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    with pytest.raises(UserError, match="detached"):
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
def test_parameters_outside_the_model_are_refused_unless_frozen(fused: bool) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    extra = nn.Linear(CLASSES, CLASSES).requires_grad_(False)
    optimizer.add_param_group({"params": list(extra.parameters())})
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    extra.requires_grad_(True)
    optimizer.zero_grad()
    F.cross_entropy(extra(private(x)), y).backward()
    with pytest.raises(UserError, match="not the private model's"):
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_second_optimizer_finds_no_sums_without_noise(fused: bool, micro_batches: int) -> None:
    """Only the private optimizer adds noise; what it does not hold is left without a gradient, and that is said."""
    model = make_model()
    with pytest.warns(UserWarning, match=r"2\.weight and 3 more.*not in the optimizer"):
        private, optimizer, loader = make_private(model, torch.optim.SGD(model[0].parameters(), lr=1.0), fused=fused)
    other = torch.optim.SGD(model[3].parameters(), lr=1.0)
    x, y = next(iter(loader))
    before = model[3].weight.detach().clone()
    for _ in range(micro_batches):
        F.cross_entropy(private(x), y).backward()
    optimizer.step()
    other.step()
    torch.testing.assert_close(model[3].weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_parameter_frozen_after_backward_stays_where_it_is(fused: bool, micro_batches: int) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused, noise_multiplier=1.0)
    x, y = next(iter(loader))
    for _ in range(micro_batches):
        F.cross_entropy(private(x), y).backward()
    frozen, before = model[3].weight, model[3].weight.detach().clone()
    frozen.requires_grad_(False)
    others = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(frozen, before)
    assert not torch.equal(model[0].weight, others)


@pytest.mark.parametrize("secure", [True, False])
def test_noise_is_added_to_a_half_precision_sum_before_it_is_rounded(monkeypatch, secure: bool) -> None:
    """Rounded before, the sums of a batch and of the batch without one sample may differ by more than C."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    data = TensorDataset(torch.randn(16, 8).bfloat16())
    private, optimizer, _ = make_private(model, sgd(model), loader=DataLoader(data, batch_size=8), fused=False)
    optimizer.secure_mode = secure
    noised: list[torch.Tensor] = []

    def record(std, reference, **options):
        noised.append(reference.clone())
        return torch.zeros_like(reference)

    monkeypatch.setattr("dpscope.flash.opacus.private_optimizer._generate_noise", record)
    monkeypatch.setattr(
        "dpscope.flash.opacus.private_optimizer.privatise_gradients",
        lambda optimizer, sums, how: noised.extend(total.clone() for _, total in sums),
    )
    for _ in range(2):
        noised.clear()
        for part in data.tensors[0].split(8):
            private(part).sin().sum(1).mean().backward()
        optimizer.step()
        grad = model.weight.grad.clone()
        optimizer.zero_grad(set_to_none=False)
    assert {total.dtype for total in noised} == {torch.float32}
    assert not torch.equal(noised[0], noised[0].bfloat16().float())
    scale = 1 / 16 if secure else 1.0
    torch.testing.assert_close(grad, (noised[0] * scale).bfloat16())
    assert not optimizer.engine.running_sums


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_noise_multiplier_that_went_wrong_is_refused_at_the_step(value: float) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), noise_multiplier=1.0)
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    optimizer.noise_multiplier = value
    with pytest.raises(UserError, match="noise_multiplier"):
        optimizer.step()

"""The loss scaler for float16: a scaled loss gives the same private step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from dpscope.errors import UserError
from dpscope.flash import GradScaler
from tests.unit.flash.private_training import (
    clipped_mean,
    make_model,
    make_private,
    moved,
    sgd,
    step,
)


def scaled_backward(scaler, private, x, y) -> None:
    scaler.scale(F.cross_entropy(private(x), y, reduction="none").nan_to_num().mean()).backward()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_scaled_loss_gives_the_same_step(fused: bool, unscale: bool, micro_batches: int) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    scaler = GradScaler("cpu", optimizer=optimizer, init_scale=1024.0)
    batches = list(loader)[:micro_batches]
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        reference = copy.deepcopy(model)
        optimizer.zero_grad()
        for x, y in batches:
            scaled_backward(scaler, private, x, y)
        if unscale:
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        expected = clipped_mean(x, y, divisor=16 * micro_batches, model=reference)
        for got, want in zip(moved(before, model), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_step_without_the_scaler_is_one_without_its_scale() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model, lr=1e-6))
    scaler = GradScaler("cpu", optimizer=optimizer, init_scale=1024.0)
    x, y = next(iter(loader))
    scaled_backward(scaler, private, x, y)
    scaler.step(optimizer)
    scaled = optimizer.engine.norms
    scaler.update()
    step(private, optimizer, x, y)
    torch.testing.assert_close(optimizer.engine.norms, scaled, rtol=1e-3, atol=0)


def test_a_micro_batch_keeps_the_scale_of_its_loss_when_the_scale_changes() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    scaler = GradScaler("cpu", optimizer=optimizer, init_scale=1024.0, growth_interval=1)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    scaled_backward(scaler, private, x, y)
    scaler.update(16.0)
    scaler.step(optimizer)
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("where", [0, 1])
def test_an_overflowing_sample_is_left_out_and_lowers_the_scale(where: int) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    scaler = GradScaler("cpu", optimizer=optimizer, init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    for index, (x, y) in enumerate(list(loader)[:2]):
        x[3] = float("inf") if index == where else 0.0
        scaled_backward(scaler, private, x, y)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.engine.nonfinite_samples.item() == 1
    assert scaler.get_scale() == 512.0
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert any((difference != 0).any() for difference in moved(before, model))
    optimizer.zero_grad()
    scaled_backward(scaler, private, *next(iter(loader)))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0  # one overflow counts once


def test_a_scaler_that_does_not_know_the_optimizer_is_refused() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    scaler = GradScaler("cpu")
    scaled_backward(scaler, private, *next(iter(loader)))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(UserError, match="optimizer=optimizer"):
            call(optimizer)
    with pytest.raises(UserError, match="SGD"):
        scaler.attach(sgd(model))
    with pytest.raises(UserError, match="was not scaled"):
        GradScaler("cpu", optimizer=optimizer).step(optimizer)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_torchs_own_scaler_is_refused_by_the_name_of_ours(unscale: bool, micro_batches: int) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu")
    for x, y in list(loader)[:micro_batches]:
        scaled_backward(scaler, private, x, y)
    if unscale:
        scaler.unscale_(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match=r"dpscope\.flash\.GradScaler"):
        scaler.step(optimizer)
    assert not any(difference.any() for difference in moved(before, model))
    step(private, optimizer, x, y)  # without it all is well


@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_a_scaler_that_is_switched_off_does_nothing(kind) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    scaler = kind("cpu", enabled=False)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    scaled_backward(scaler, private, x, y)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)

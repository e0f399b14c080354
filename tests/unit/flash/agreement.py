"""How the flash tests hold the engine against the oracle, and with which tolerances."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dpscope.batches import cast_batch
from dpscope.flash import FlashEngine, OracleResult, run_oracle
from dpscope.flash.oracle import per_sample_gradients

Losses = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> (B,), one loss a sample

# (clipped sums, per parameter; norms). What the contract promises (epsilon: 1.2e-7 and 2.2e-16). CPUs add up in other
# orders: one model's norms are 1.1e-6 off on one, as float32 autograd's are there, and 1e-7 on another.
TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.float64: (1e-12, 1e-12)}
# Where backward itself cancels, float32 autograd is further than that from the truth, and the engine, which starts
# from the same g, cannot be nearer: it may err as the float32 oracle does, times this.
NOISE_MARGIN = 4.0

CLIPPING = ("all", "none", "some")
PATHS = (None, "gram", "direct", "keep")
REDUCTIONS = ("mean", "sum")


# A backward pass rounds beside its largest terms: a parameter whose gradient nearly cancels (a bias before a
# normalisation) keeps an error of about this many epsilons of the whole gradient.
EPSILONS = 2.0


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm())


def whole_size(result: OracleResult) -> float:
    return float(sum(total.double().square().sum() for total in result.clipped_sums.values()) ** 0.5)


def max_grad_norm_for(clipping: str, norms: Tensor) -> float:
    """C so small that all samples are clipped, so large that none is, or in between."""
    positive = norms[norms.isfinite() & (norms > 0)]
    if not len(positive):
        return 1.0
    return {
        "all": float(positive.min()) / 100,
        "none": float(positive.max()) * 100,
        "some": float(positive.median()) * 1.001,
    }[clipping]


def one_loss(losses: Losses) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: losses(model, batch).sum()


def reference(model: nn.Module, batch: Any, losses: Losses, clipping: str = "some") -> tuple[OracleResult, float]:
    """The oracle in float64, and the C that clips as asked: its gradients, the same for any C, are computed once."""
    double = copy.deepcopy(model).to(torch.float64), cast_batch(batch, torch.float64)
    gradients = list(per_sample_gradients(*double, one_loss(losses)))
    with mock.patch("dpscope.flash.oracle.per_sample_gradients", lambda *_: gradients):
        norms = run_oracle(*double, one_loss(losses), max_grad_norm=1.0).norms
        c = max_grad_norm_for(clipping, norms)
        return run_oracle(*double, one_loss(losses), max_grad_norm=c), c


def private_step(engine: FlashEngine, batch: Any, losses: Losses) -> None:
    found = losses(engine.model, batch)
    (found.mean() if engine.loss_reduction == "mean" else found.sum()).backward()
    engine.finish()


def assert_exact(
    model: nn.Module,
    batch: Any,
    losses: Losses,
    *,
    clipping: str = "some",
    loss_reduction: str = "mean",
    path: str | None = None,
) -> FlashEngine:
    """One private step of the model gives the oracle's norms and clipped sums. Leaves the engine detached."""
    truth, c = reference(model, batch, losses, clipping)
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=c, loss_reduction=loss_reduction, path=path) as engine:
        private_step(engine, batch, losses)
    assert_agrees(model, batch, losses, engine, truth, c)
    return engine


def assert_next_step_is_exact(engine: FlashEngine, batch: Any, losses: Losses) -> None:
    """One more private step of an attached engine gives the oracle's norms and clipped sums of the model as it is."""
    with engine.without_taps():
        truth, engine.max_grad_norm = reference(engine.model, batch, losses)
    engine.zero_grad()
    private_step(engine, batch, losses)
    with engine.without_taps():
        assert_agrees(engine.model, batch, losses, engine, truth, engine.max_grad_norm)


def assert_agrees(
    model: nn.Module, batch: Any, losses: Losses, engine: FlashEngine, truth: OracleResult, c: float
) -> None:
    dtype = next(model.parameters()).dtype
    sum_tolerance, norm_tolerance = TOLERANCES[dtype]
    named = dict(model.named_parameters())
    noisy: OracleResult | None = None
    rounding = EPSILONS * torch.finfo(dtype).eps * whole_size(truth)
    for name, total in truth.clipped_sums.items():
        error = distance(named[name].grad, total)
        allowed = sum_tolerance * float(total.norm()) + rounding
        if error > allowed:
            noisy = noisy or run_oracle(model, batch, one_loss(losses), max_grad_norm=c)
            allowed = NOISE_MARGIN * distance(noisy.clipped_sums[name], total)
            assert error <= allowed, f"{name}: error {error:.1e} of {total.norm():.1e}, allowed {allowed:.1e}"
    assert engine.norms is not None
    positive = truth.norms > 0
    errors = (engine.norms.double() - truth.norms).abs()[positive] / truth.norms[positive]
    if len(errors) and float(errors.max()) > norm_tolerance:
        noisy = noisy or run_oracle(model, batch, one_loss(losses), max_grad_norm=c)
        noise = (noisy.norms - truth.norms).abs()[positive] / truth.norms[positive]
        assert float(errors.max()) <= NOISE_MARGIN * float(noise.max()), f"norms: {errors.max():.1e}"

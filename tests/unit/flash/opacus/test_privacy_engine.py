"""PrivacyEngine: what an Opacus user switches on. The loop stays the same, and so does the privacy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from tests.torch_here import takes_compiled
from tests.unit.flash.private_training import (
    CLASSES,
    FEATURES,
    clipped_mean,
    make_data,
    make_model,
    make_private,
    moved,
    sgd,
    step,
)


def test_the_model_comes_back_as_it_was_given() -> None:
    model = make_model()
    names, kind = list(model.state_dict()), type(model)
    private, optimizer, _ = make_private(model, sgd(model))
    assert private is model
    assert (list(private.state_dict()), type(private)) == (names, kind)
    assert isinstance(PrivacyEngine(), OpacusPrivacyEngine)
    optimizer.engine.detach()
    F.cross_entropy(model(torch.randn(2, FEATURES)), torch.zeros(2, dtype=torch.long)).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_applies_the_clipped_mean(fused: bool | None) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_any_other_optimizer_finds_the_private_gradient_in_grad() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, torch.optim.RMSprop(model.parameters(), lr=0.1))
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    for p, expected in zip(model.parameters(), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-7)


def test_micro_batches_of_a_step_add_up() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    before = [p.detach().clone() for p in model.parameters()]
    (x1, y1), (x2, y2) = list(loader)[:2]
    optimizer.zero_grad()
    F.cross_entropy(private(x1), y1).backward()
    F.cross_entropy(private(x2), y2).backward()
    optimizer.step()
    assert optimizer.accumulated_iterations == 1  # the count starts anew
    expected = clipped_mean(torch.cat([x1, x2]), torch.cat([y1, y2]), divisor=32)
    for got, want in zip(moved(before, model), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_a_logical_batch_split_by_opacus_equals_the_whole(fused: bool | None) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    before = [p.detach().clone() for p in model.parameters()]
    whole_x, whole_y = next(iter(loader))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as physical:
        for count, (x, y) in enumerate(physical):
            optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
            if count == 3:  # 5 + 5 + 5 + 1 samples
                break
    for got, expected in zip(moved(before, model), clipped_mean(whole_x, whole_y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_forgetting_zero_grad_is_an_error() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    optimizer.step()
    F.cross_entropy(private(x), y).backward()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()


def test_clearing_gradients_through_the_model_is_as_good_as_through_the_optimizer() -> None:
    """Hugging Face's Trainer clears them so."""
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    for x, y in list(loader)[:2]:
        before = [p.detach().clone() for p in model.parameters()]
        expected = clipped_mean(x, y, divisor=16, model=model)
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        model.zero_grad()
        for got, want in zip(moved(before, model), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@takes_compiled
def test_a_model_that_is_compiled_later_clears_gradients_as_the_model_does() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    compiled = torch.compile(private, backend="eager")
    for x, y in list(loader)[:3]:
        compiled.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()


def test_accumulation_under_poisson_sampling_is_an_error() -> None:
    model = make_model()
    private, optimizer, _ = make_private(model, sgd(model), poisson_sampling=True)
    x, y = make_data().tensors
    F.cross_entropy(private(x[:4]), y[:4]).backward()
    loss = F.cross_entropy(private(x[4:8]), y[4:8])
    with pytest.raises(ValueError, match="BatchMemoryManager"):
        loss.backward()
    optimizer.step()  # the first batch's
    optimizer.zero_grad()
    F.cross_entropy(private(x[:4]), y[:4]).backward()


@pytest.mark.parametrize("backward", [True, False])
def test_an_empty_batch_gives_a_step_of_noise_alone(backward: bool) -> None:
    model = make_model()
    private, optimizer, _ = make_private(model, sgd(model), noise_multiplier=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    if backward:
        F.cross_entropy(private(torch.zeros(0, FEATURES)), torch.zeros(0, dtype=torch.long)).backward()
    optimizer.step()
    change = torch.cat([difference.flatten() for difference in moved(before, model)])
    assert torch.isfinite(change).all()
    # σC / B = 1 · 0.5 / 16; the spread of n normals errs by about 1/√(2n)
    assert abs(change.std().item() / (0.5 / 16) - 1) < 5 / math.sqrt(2 * change.numel())


# -- what a step is made of --------------------------------------------------------------------------------------------


def test_a_micro_batch_that_zero_grad_threw_away_is_not_counted() -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    (x, y), (x2, y2) = list(loader)[:2]
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        F.cross_entropy(private(x2), y2).backward()
    private.zero_grad()
    F.cross_entropy(private(x), y).backward()
    assert optimizer.accumulated_iterations == 1
    optimizer.step()
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
@pytest.mark.parametrize("thrown_away", [True, False])
def test_zero_grad_within_a_logical_batch_drops_what_is_pending_and_keeps_the_sums(fused, whose, thrown_away) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    clear = optimizer.zero_grad if whose == "optimizer" else private.zero_grad
    (x, y), (x2, y2) = list(loader)[:2]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.signal_skip_step(True)
    optimizer.signal_skip_step(False)
    F.cross_entropy(private(x[:9]), y[:9]).backward()
    optimizer.step()
    clear()
    if thrown_away:
        F.cross_entropy(private(x2), y2).backward()
        clear()
    F.cross_entropy(private(x[9:]), y[9:]).backward()
    optimizer.step()
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("closing", ["by the next forward", "by a skipped step"])
def test_noise_is_that_of_the_largest_clip_norm_of_a_step(fused: bool, closing: str) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), noise_multiplier=1000.0, fused=fused)
    x, y = next(iter(loader))

    def spread() -> float:
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        F.cross_entropy(private(x), y).backward()
        divisor = 16 * optimizer.accumulated_iterations
        optimizer.step()
        optimizer.zero_grad()
        return float((before - torch.cat([p.detach().flatten() for p in model.parameters()])).std()) * divisor / 1000

    optimizer.max_grad_norm = 10.0
    if closing == "by a skipped step":
        optimizer.signal_skip_step(True)
    F.cross_entropy(private(x), y).backward()
    if closing == "by a skipped step":
        optimizer.step()
        optimizer.zero_grad()
    else:
        private(x)
    optimizer.max_grad_norm = 0.01
    assert spread() == pytest.approx(10.0, rel=0.25)
    assert spread() == pytest.approx(0.01, rel=0.25)  # the next step is a new one


def test_accounting_is_opacuss_own() -> None:
    def spend(engine_class, mode: str) -> float:
        engine, model = engine_class(accountant="rdp"), make_model()
        private, optimizer, loader = make_private(
            model, sgd(model, 0.01), engine, noise_multiplier=1.1, poisson_sampling=True, grad_sample_mode=mode
        )
        for _ in range(2):
            for x, y in loader:
                step(private, optimizer, x, y)
        return engine.get_epsilon(1e-5)

    assert spend(PrivacyEngine, "flash") == spend(OpacusPrivacyEngine, "hooks")


def test_schedulers_reach_the_engine() -> None:
    model = make_model()
    _, optimizer, _ = make_private(model, sgd(model), noise_multiplier=1.0)
    ExponentialNoise(optimizer, gamma=0.5).step()
    ExponentialGradClip(optimizer, gamma=0.5).step()
    assert optimizer.noise_multiplier == 0.5
    assert optimizer.engine.max_grad_norm == 0.25


@pytest.mark.slow
def test_training_learns_as_opacus_does() -> None:
    """200 private steps on a learnable task: the same loss as Opacus flat without noise, as good with it."""

    def train(engine, noise: float, **mode: str) -> float:
        model = make_model()
        generator = torch.Generator().manual_seed(0)
        private, optimizer, loader = make_private(
            model,
            sgd(model, 0.5),
            engine,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            noise_generator=generator,
            **mode,
        )
        for _ in range(50):
            for x, y in loader:
                step(private, optimizer, x, y)
        x, y = make_data().tensors
        return F.cross_entropy(model(x), y).item()

    flash, flat = (
        train(PrivacyEngine(), 0.0),
        train(OpacusPrivacyEngine(), 0.0, grad_sample_mode="hooks"),
    )
    assert flash == pytest.approx(flat, rel=1e-3)
    noisy_flash, noisy_flat = (
        train(PrivacyEngine(), 0.5),
        train(OpacusPrivacyEngine(), 0.5, grad_sample_mode="hooks"),
    )
    assert max(noisy_flash, noisy_flat) < 0.6 * math.log(CLASSES)  # chance is log(4) = 1.39
    assert noisy_flash == pytest.approx(noisy_flat, abs=0.15)


# -- loss scaling ------------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


BAD_INPUT = {
    "max_grad_norm": ({"max_grad_norm": 0.0}, "max_grad_norm"),
    "one norm a layer": ({"max_grad_norm": [1.0, 1.0]}, "finite number above 0"),
    "negative noise": ({"noise_multiplier": -1.0}, "noise_multiplier"),
    "batch second": ({"batch_first": False}, "batch_first"),
    "reduction": ({"loss_reduction": "median"}, "loss_reduction"),
    "a criterion that does not reduce": ({"criterion": nn.CrossEntropyLoss(reduction="none")}, "reduction is 'none'"),
    "a criterion of another reduction": ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "mean or the sum"),
    "no batch size": ({"loader": DataLoader(make_data(), batch_size=None)}, "batch size"),
    "no length": ({"loader": DataLoader(Endless(), batch_size=4)}, "length"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_a_sentence_and_leaves_the_model_alone(name: str) -> None:
    options, message = BAD_INPUT[name]
    model = make_model()
    with pytest.raises(UserError, match=message):
        make_private(model, sgd(model), **options)
    assert all("forward" not in vars(module) for module in model.modules())


def test_batch_norm_is_refused_by_name_with_the_replacement() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8))
    with pytest.raises(UserError, match=r"1.*BatchNorm1d.*GroupNorm"):
        make_private(model, sgd(model))


def test_a_model_wrapped_by_opacus_is_not_made_private_again() -> None:
    wrapped = GradSampleModule(make_model())
    with pytest.raises(UserError, match="already private"):
        make_private(wrapped, sgd(wrapped))


def test_make_private_is_told_how_many_samples_there_are():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, names, x):
            return self.layer(x)

    model = Flat()
    model, optimizer, _ = make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), batch_size_of=lambda args, kwargs: len(args[0])
    )
    model(["a", "b", "c"], torch.randn(3, FEATURES)).sum().backward()
    optimizer.step()
    assert optimizer.engine.samples == 3
    optimizer.zero_grad()
    with pytest.raises(UserError, match=r"no argument of the model has a row for each of its 3 samples"):
        model(["a", "b", "c"], torch.randn(4, FEATURES))


def test_an_optimizer_that_calls_its_closure_several_times_a_step_is_refused() -> None:
    model = make_model()
    with pytest.raises(UserError, match="LBFGS calls its closure several times a step"):
        make_private(model, torch.optim.LBFGS(model.parameters()))

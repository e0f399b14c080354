"""PrivacyEngine: what an Opacus user switches on. The loop stays the same, and so does the privacy."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from tests.unit.flash.private_training import (
    CLASSES,
    FEATURES,
    clipped_mean,
    make_data,
    make_loader,
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


class Seeded:
    """A private run whose noise comes from a given generator; always the same batch."""

    def __init__(self, seed: int = 11, fused: bool | None = None) -> None:
        self.engine = PrivacyEngine()
        self.model = make_model()
        self.model, self.optimizer, _ = make_private(
            self.model,
            torch.optim.AdamW(self.model.parameters(), lr=0.1),
            self.engine,
            noise_multiplier=1.0,
            noise_generator=torch.Generator().manual_seed(seed),
            fused=fused,
        )

    def steps(self, count: int) -> torch.Tensor:
        x, y = make_data().tensors
        for _ in range(count):
            step(self.model, self.optimizer, x[:16], y[:16])
        return self.model[0].weight.detach().clone()

    def save(self) -> io.BytesIO:
        path = io.BytesIO()
        self.engine.save_checkpoint(path=path, module=self.model, optimizer=self.optimizer)
        return path

    def load(self, path: io.BytesIO, **options: bool) -> None:
        path.seek(0)
        self.engine.load_checkpoint(path=path, module=self.model, optimizer=self.optimizer, **options)


@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_continues_the_noise_of_a_given_generator_if_told_to(fused: bool) -> None:
    run = Seeded(fused=fused)
    run.steps(2)
    saved = run.save()
    expected = run.steps(1)
    other = Seeded(fused=fused)
    other.load(saved, resume_noise=True)
    torch.testing.assert_close(other.steps(1), expected, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_going_back_to_a_checkpoint_and_on_draws_other_noise(fused: bool) -> None:
    run = Seeded(fused=fused)
    run.steps(2)
    saved = run.save()
    branches = [run.steps(1)]
    for _ in range(2):
        run.load(saved)
        branches.append(run.steps(1))
    assert not any(torch.equal(a, b) for i, a in enumerate(branches) for b in branches[:i])


def test_a_resumed_run_of_the_same_seed_is_refused_unless_it_resumes_the_noise() -> None:
    """It would add the noise of the first steps again."""
    run = Seeded()
    run.steps(2)
    saved = run.save()
    with pytest.raises(UserError, match=r"another seed.*resume_noise=True"):
        Seeded().load(saved)
    Seeded(seed=12).load(saved)


def test_noise_that_was_not_saved_is_not_resumed() -> None:
    model = make_model()
    engine = PrivacyEngine()
    model, optimizer, _ = make_private(model, sgd(model), engine, noise_multiplier=1.0)
    with pytest.raises(UserError, match="no noise stream"):
        optimizer.load_state_dict(optimizer.state_dict(), resume_noise=True)
    run = Seeded()
    with pytest.raises(UserError, match="give make_private one"):
        optimizer.load_state_dict(run.optimizer.state_dict(), resume_noise=True)


@pytest.mark.parametrize("fused", [True, False])
def test_without_a_generator_a_checkpoint_holds_nothing_of_the_noise_and_does_not_replay_it(fused: bool) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), noise_multiplier=1.0, fused=fused)
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    weights, saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    assert set(saved) == set(optimizer.original_optimizer.state_dict())
    branches = []
    for _ in range(2):
        model = make_model()
        private, optimizer, _ = make_private(model, sgd(model), noise_multiplier=1.0, fused=fused)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        step(private, optimizer, x, y)
        branches.append(model[0].weight.detach().clone())
    assert not torch.equal(*branches)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_private_optimizer_is_not_copied(duplicate) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model))
    with pytest.raises(UserError, match="state_dict"):
        duplicate(optimizer)
    x, y = next(iter(loader))
    step(private, optimizer, x, y)


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


# -- what reaches the parameters is clipped and noised, whatever else happened -----------------------------------------


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
def test_gradients_put_into_grad_by_hand_are_refused(fused: bool) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), fused=fused)
    x, y = next(iter(loader))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    F.cross_entropy(private(x), y).backward()
    with pytest.raises(UserError, match=r"0\.weight\.grad.*zero_grad"):
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    step(private, optimizer, x, y)
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


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

    monkeypatch.setattr("dpscope.flash.private_optimizer._generate_noise", record)
    monkeypatch.setattr(
        "dpscope.flash.private_optimizer.privatise_gradients",
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
    assert not optimizer.engine.running_sums._wide


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_noise_multiplier_that_went_wrong_is_refused_at_the_step(value: float) -> None:
    model = make_model()
    private, optimizer, loader = make_private(model, sgd(model), noise_multiplier=1.0)
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    optimizer.noise_multiplier = value
    with pytest.raises(UserError, match="noise_multiplier"):
        optimizer.step()


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
    "one norm a layer": ({"max_grad_norm": [1.0, 1.0]}, "flat clipping"),
    "negative noise": ({"noise_multiplier": -1.0}, "noise_multiplier"),
    "per-layer clipping": ({"clipping": "per_layer"}, r"flat.*opacus\.PrivacyEngine"),
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
    with pytest.raises(UserError, match=r"layer .*\(4, 8\) .*3 samples"):
        model(["a", "b", "c"], torch.randn(4, FEATURES))

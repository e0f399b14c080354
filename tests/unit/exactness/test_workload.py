"""What a check says of the workload itself, before any method: samples that mix, parameters that never train."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope import Workload
from dpscope.errors import UserError
from dpscope.exactness import reference, subject
from dpscope.exactness.check import check
from dpscope.exactness.subject import make_subject
from tests.unit.exactness.planted_faults import LITTLE, Little, little_loss, make_batch


def images(seed, device):
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)).to(device)


def mean_square(model, batch):
    return model(batch).flatten(1).square().mean(1)


def workload_of(make_model, batch=images, loss=mean_square):
    return Workload(model=make_model, batch=batch, loss=loss)


class Attention(nn.Module):
    """Attends over dimension 0, which is the batch: a slip of a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(8, 2)  # batch_first was forgotten

    def forward(self, x):
        return self.inside(x, x, x)[0]


class Folded(nn.Module):
    """Folds positions into rows and centres the rows: samples meet although there is no dimension of samples."""

    def forward(self, x):
        return x.flatten(0, 1) - x.flatten(0, 1).mean(0)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient.roll(1, 0) if len(gradient) > 1 else gradient


class MixesInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(108, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(Backward.apply(torch.tanh(self.first(x.flatten(1)))))


class MixesBetweenModules(nn.Module):
    """Centres the batch between two layers, neither of which is to blame; a mask of -inf goes through a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.masked, self.second = nn.Linear(108, 5), nn.Identity(), nn.Linear(5, 3)

    def forward(self, x):
        h = self.first(x.flatten(1))
        h = self.masked(h.masked_fill(h < 0, -torch.inf)).nan_to_num(neginf=0.0)
        return self.second(h - h.mean(0))


def rows(seed, device):
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(seed)).to(device)


MIXING = {
    "samples mix in 1 (BatchNorm2d). Alone, sample 0 has a loss of": workload_of(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    ),
    "samples mix in 1.inside (MultiheadAttention)": workload_of(
        lambda: nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 2)), batch=rows
    ),
    "samples mix in 1 (Folded)": workload_of(
        lambda: nn.Sequential(nn.Linear(8, 8), Folded(), nn.Linear(8, 2)),
        batch=rows,
        loss=lambda model, batch: model(batch).view(len(batch), -1).square().mean(1),
    ),
    "samples mix before second (Linear)": workload_of(MixesBetweenModules),
    "samples mix in the loss: every module's output for a sample is its own": workload_of(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 2)),
        loss=lambda model, batch: model(batch).square().sum(1) / batch.shape[0],
    ),
    "samples mix in the backward pass: the batch's gradient of first.weight": workload_of(MixesInBackward),
}


@pytest.mark.parametrize("sentence", MIXING)
def test_samples_that_mix_are_found_where_they_meet_and_nothing_is_exact_then(check_planted, sentence):
    found, _ = check_planted("OnImages", MIXING[sentence])
    assert len(found.faults) == 1 and found.faults[0].startswith(sentence)
    assert not found.ok


@pytest.mark.parametrize("model", [Little, lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))])
def test_samples_that_do_not_mix_are_left_in_peace(check_planted, model):
    workload = LITTLE if model is Little else workload_of(model, batch=rows)
    assert check_planted("ByHand" if model is Little else "OnImages", workload)[0].faults == []


class WithIdlers(Little):
    """A parameter that nothing uses, and one whose gradient is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.still = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, ids):
        return super().forward(ids) + 0 * self.still.sum()


def test_parameters_that_no_gradient_reaches_are_named_and_the_verdict_is_about_the_rest(check_planted):
    found, method = check_planted("ByHandWithUnused", replace(LITTLE, model=WithIdlers))
    assert found.warnings == [
        "no gradient reaches unused: the loss does not depend on it, so it never trains",
        "the gradient of still is zero for every sample: it does not move in this step",
    ]
    assert found.ok and method.verdict == "exact"


class Adapted(Little):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6, bias=False)
        nn.init.zeros_(self.up.weight)  # as LoRA's B

    def forward(self, ids):
        x = torch.tanh(self.hidden(self.tokens(ids)))
        return self.head(torch.tanh(self.frozen(x) + self.up(self.adapter(x))))


def test_what_a_zero_hides_is_checked_all_the_same(check_planted):
    workload = replace(LITTLE, model=Adapted)
    found, _ = check_planted("ByHand", workload)
    assert found.ok
    assert found.notes == [
        "no gradient reaches adapter.weight at first, and others start at zero; those were given small random values "
        "for the check: up.weight"
    ]
    assert "does not move adapter.weight" in check_planted("AdapterNeverTrains", workload)[1].faults[0]


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_gradients_that_float32_cannot_hold_are_refused_with_what_to_do(check_planted, scale):
    workload = replace(LITTLE, loss=lambda model, batch: scale * LITTLE.loss(model, batch))
    with pytest.raises(UserError, match=r"in float32 the gradient of every sample is zero, inf or NaN.*--dtype fp64"):
        check_planted("ByHand", workload)


class Gated(Little):
    """The gradient of `adapter` is zero by what the model computes, and no parameter is zero."""

    def forward(self, ids):
        x = torch.tanh(self.hidden(self.tokens(ids)))
        return self.head(torch.tanh(self.frozen(x) + 0 * self.adapter(x)))


def test_where_no_parameter_is_zero_none_is_said_to_be(check_planted):
    found, _ = check_planted("ByHand", replace(LITTLE, model=Gated))
    assert found.notes == []
    assert "the gradient of adapter.weight is zero for every sample" in " ".join(found.warnings)


def test_tied_parameters_are_listed(check_planted):
    assert check_planted("ByHand")[0].tied == [["tokens.weight", "head.weight"]]


class WithDropout(Little):
    attention_dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.attention_dropout = nn.Dropout(0.5), 0.5

    def forward(self, ids):
        dropped = nn.functional.dropout(super().forward(ids), self.attention_dropout, self.training)
        return self.drop(dropped)


def test_dropout_is_switched_off_and_said(check_planted):
    found, _ = check_planted("ByHand", replace(LITTLE, model=WithDropout))
    assert found.ok and found.notes == ["dropout is off for the check (2 modules)"]


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, batch: little_loss(model, batch) * (1 + torch.rand(())), "gives another loss the second time"),
        (lambda model, batch: little_loss(model, batch).mean(), "must return one loss per sample"),
        (lambda model, batch: little_loss(model, batch)[:2], "one loss per sample is needed"),
        (lambda model, batch: little_loss(model, batch) * torch.inf, "the loss of every sample is inf"),
        (lambda model, batch: (little_loss(model, batch) * 0).sqrt(), "the gradient of every sample is inf or NaN"),
        (lambda model, batch: little_loss(model, batch).detach(), "no parameter receives a gradient"),
    ],
)
def test_a_workload_that_cannot_be_checked_is_a_users_mistake(check_planted, loss, sentence):
    with pytest.raises(UserError, match=sentence):
        check_planted("ByHand", replace(LITTLE, loss=loss))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tolerance": float("nan")}, "tolerance must be a number above 0, not nan"),
        ({"tolerance": 1.0}, "tolerance must be a number above 0, from 1e-15 to 0.1"),
        ({"max_grad_norm": float("inf")}, "max grad norm must be a number above 0, not inf"),
        ({"max_grad_norm": True}, "max grad norm must be a number above 0, not True"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"batch_size": 3}, "the workload's batch has 4 samples where --batch-size says 3"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16': choose one of fp32, fp64"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(check_planted, options, sentence):
    with pytest.raises(UserError, match=sentence):
        check_planted("ByHand", **options)


def test_a_model_without_trainable_parameters_is_a_users_mistake(check_planted):
    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        check_planted("ByHand", replace(LITTLE, model=lambda: Little().requires_grad_(False)))


def test_samples_without_a_finite_gradient_or_without_any_are_named(check_planted):
    weights = torch.tensor([1.0, 0.0, float("inf"), 1.0])

    def loss(model, batch):
        return little_loss(model, batch) * batch["weight"]

    def batch(seed, device):
        return {**make_batch(seed, device), "weight": weights}

    found, method = check_planted("ByHandUnlessNotFinite", replace(LITTLE, loss=loss, batch=batch))
    assert found.warnings == [
        "the gradient of sample 2 is inf or NaN: it has to be left out of the sum",
        "the gradient of sample 1 is zero: nothing is learned from it",
    ]
    assert method.verdict == "exact"
    assert method.norm_error < 1e-5 and method.factor_error < 1e-5  # of the samples that have a gradient
    _, careless = check_planted("KeepsTheNotFinite", replace(LITTLE, loss=loss, batch=batch))
    assert careless.faults[0].startswith("the step leaves inf or NaN in")


def test_one_sample_is_clipped_too_but_cannot_show_mixing(check_planted):
    found, _ = check_planted("ByHand", replace(LITTLE, batch=lambda seed, device: make_batch(seed, device, size=1)))
    assert found.ok
    assert found.warnings == ["one sample cannot show whether samples mix: give --batch-size 2 or more"]
    assert [sum(norm > clip_norm for norm in found.norms) for clip_norm in found.clip_norms] == [0, 1, 1]


def test_equal_samples_are_checked_by_their_sums_alone(check_planted):
    def twins(seed, device):
        return {key: x[:1].expand(4, -1) for key, x in make_batch(seed, device).items()}

    found, method = check_planted("ByHand", replace(LITTLE, batch=twins))
    assert found.ok and method.norm_error is None and method.factor_error is None


class Encoding(UserDict):
    """As tokenizers return their batches."""


def test_a_batch_may_be_what_a_tokenizer_returns(check_planted):
    found, _ = check_planted("ByHand", replace(LITTLE, batch=lambda seed, device: Encoding(make_batch(seed, device))))
    assert found.ok and found.batch_size == 4


def test_a_model_that_is_none_and_a_batch_without_tensors_get_a_sentence():
    three = Workload(model=lambda: 3, batch=lambda seed, device: torch.randn(4, 3), loss=lambda model, x: x.sum(1))
    with pytest.raises(UserError, match=r"the workload's model must be an nn\.Module, but it is int 3"):
        check(three, ["flash"])
    words = Workload(model=lambda: nn.Linear(3, 1), batch=lambda seed, device: ["a", "b"], loss=lambda model, x: x)
    with pytest.raises(UserError, match="the batch holds no tensor whose first dimension is the sample"):
        check(words, ["flash"])


class Reentrant(Little):
    def forward(self, ids):
        x = torch.tanh(checkpoint(self.hidden, self.tokens(ids), use_reentrant=True))
        return self.head(torch.tanh(self.frozen(x) + checkpoint(self.adapter, x, use_reentrant=True)))


def test_layers_in_reentrant_checkpoints_are_checked_as_others():
    found = check(replace(LITTLE, model=Reentrant), ["flash"], neighbours=False)
    assert found.ok and found.faults == []


def test_a_model_whose_parameters_come_in_turns_gives_the_same_verdicts(monkeypatch):
    whole = check(LITTLE, ["flash"], neighbours=False)
    monkeypatch.setattr(reference, "SMALL_TURN", 0)
    monkeypatch.setattr(reference, "COPIES_IN_TURN", 0)
    turns = check(LITTLE, ["flash"], neighbours=False)
    assert len(reference._turns(make_subject(LITTLE, seed=0, device="cpu"))) == whole.trainable > 1
    assert turns.ok and turns.norms == pytest.approx(whole.norms, rel=1e-12)
    assert turns.methods[0].worst.parameter_error == pytest.approx(whole.methods[0].worst.parameter_error, rel=1e-3)


def test_a_large_models_gradients_are_held_two_float64_copies_at_a_time(monkeypatch):
    monkeypatch.setattr(reference, "SMALL_TURN", 0)
    made = make_subject(
        Workload(model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), batch=rows, loss=mean_square),
        seed=0,
        device="cpu",
    )
    turns = reference._turns(made)
    sizes = {name: p.numel() for name, p in made.model.named_parameters()}
    assert [name for turn in turns for name in turn] == list(sizes) and len(turns) > 1
    assert all(made.batch_size * sum(sizes[n] for n in turn) <= 2 * sum(sizes.values()) for turn in turns)


def rows(seed, device):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(device)


def test_a_model_that_would_not_fit_is_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr(subject, "free_memory", lambda: 5 * 10**8)
    large = workload_of(lambda: nn.Linear(9, 2**20))
    told = r"10 million parameters takes about 0\.587 GB, and 0\.5 GB .* use fewer layers"
    with pytest.raises(UserError, match=told):
        check(large)

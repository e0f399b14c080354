"""Clipping rules: exact against micro-batches of one, their sensitivity held, ε as Opacus counts it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, PrivacyEngine, run_oracle
from dpscope.flash.gradients import clip_rules
from dpscope.flash.gradients.clip_rules import (
    CLIP_RULES,
    Adaptive,
    ClipRule,
    PerGroup,
    PerLayer,
    check_rule,
    make_rule,
)
from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.update.noise_source import NoiseSource, normal_of_count
from tests.unit.flash.agreement import one_loss, private_step
from tests.unit.flash.checkpointed_models import CheckpointedDecoder
from tests.unit.flash.flash_models import Decoder, EveryFamily, randomised, token_batch, token_losses
from tests.unit.flash.private_training import CLASSES, FEATURES, make_data, make_loader, make_model, make_private, sgd

BOUNDS = {"per_group": {"*norm*": 0.3, "*tokens*": 0.7, "*": 0.5}}
X, Y = make_data()[:8]


def bounds_of(name: str):
    return BOUNDS.get(name, 0.5)


def assert_rule_is_exact(engine: FlashEngine, batch, losses, name: str) -> None:
    model = engine.model
    truth = run_oracle(
        copy.deepcopy(model),
        batch,
        one_loss(losses),
        max_grad_norm=bounds_of(name),
        clipping=name,
        dtype=torch.float64,
    )
    for key, parameter in model.named_parameters():
        error = float((parameter.grad.double() - truth.clipped_sums[key]).norm())
        assert error <= 1e-9 * float(truth.clipped_sums[key].norm()) + 1e-12, (name, key)
    assert torch.allclose(engine.norms, truth.norms, rtol=1e-9)
    assert torch.allclose(engine.factors, truth.factors, rtol=1e-7)


MODELS = {
    "a decoder": (Decoder, lambda: token_batch(4, 5), token_losses),
    "a tied decoder": (lambda: Decoder(tied=True), lambda: token_batch(4, 5), token_losses),
    "every family": (
        lambda: randomised(EveryFamily()),
        lambda: torch.randint(0, 5, (4, 4)),
        lambda model, ids: model(ids).sin().flatten(1).sum(1),
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", CLIP_RULES)
def test_every_rule_is_exact(name: str, kind: str, reduction: str) -> None:
    make, make_batch, losses = MODELS[kind]
    torch.manual_seed(3)
    model, batch = make().double(), make_batch()  # a parameter clipped by itself shows the rounding of its own backward
    with FlashEngine(model, max_grad_norm=bounds_of(name), clipping=name, loss_reduction=reduction) as engine:
        private_step(engine, batch, losses)
        assert_rule_is_exact(engine, batch, losses, name)


@pytest.mark.parametrize("name", CLIP_RULES)
def test_blocks_that_run_again_follow_the_rule(name: str) -> None:
    torch.manual_seed(3)
    model, batch = CheckpointedDecoder().double(), token_batch(4, 5)
    with FlashEngine(model, max_grad_norm=bounds_of(name), clipping=name, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            private_step(engine, batch, token_losses)
        assert_rule_is_exact(engine, batch, token_losses, name)


@pytest.mark.parametrize("name", CLIP_RULES)
def test_micro_batches_add_up_under_every_rule(name: str) -> None:
    torch.manual_seed(3)
    model = Decoder()
    whole = token_batch(6, 5)
    halves = [{key: value[part] for key, value in whole.items()} for part in (slice(0, 2), slice(2, 6))]
    with FlashEngine(model, max_grad_norm=bounds_of(name), clipping=name, loss_reduction="sum") as engine:
        for batch in halves:
            token_losses(model, batch).sum().backward()
        engine.finish()
    truth = run_oracle(model, whole, one_loss(token_losses), max_grad_norm=bounds_of(name), clipping=name)
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, truth.clipped_sums[key], atol=1e-5), key


@pytest.mark.parametrize("name", CLIP_RULES)
def test_no_sample_moves_the_sum_by_more_than_the_sensitivity(name: str) -> None:
    torch.manual_seed(5)
    model, batch = Decoder(), token_batch(6, 5)
    with torch.no_grad():
        model.head.weight.mul_(30)  # large gradients

    def total(chosen: list[int]) -> Tensor:
        model.zero_grad()
        with FlashEngine(model, max_grad_norm=bounds_of(name), clipping=name, loss_reduction="sum") as engine:
            private_step(engine, {key: value[chosen] for key, value in batch.items()}, token_losses)
        return torch.cat([p.grad.flatten() for p in model.parameters()]), engine.clip.sensitivity()

    everyone, sensitivity = total(list(range(6)))
    moves = [float((everyone - total([b for b in range(6) if b != left])[0]).norm()) for left in range(6)]
    assert max(moves) <= sensitivity * (1 + 1e-3)
    assert max(moves) >= sensitivity * 0.5  # the bound is no mere upper bound


def test_the_sensitivity_is_that_of_all_groups_together() -> None:
    assert make_rule("flat", 2.0).sensitivity() == 2.0
    assert PerGroup({"a*": 3.0, "*": 4.0}).sensitivity() == 5.0
    alike = make_rule("per_layer", 2.0)
    alike.bind(["a", "b", "c", "d"])
    assert alike.bounds == [1.0] * 4
    assert alike.sensitivity() == pytest.approx(2.0)


def test_noise_follows_the_sensitivity() -> None:
    model = make_model()
    bounds = [0.1 * (index + 1) for index, _ in enumerate(model.parameters())]
    _, optimizer, _ = make_private(model, sgd(model), clipping="per_layer", max_grad_norm=bounds, noise_multiplier=2.0)
    assert optimizer._privatisation().noise_std == pytest.approx(2.0 * math.hypot(*bounds))


def test_per_layer_is_that_of_opacus() -> None:
    """Opacus divides by the norm plus 1e-6; one step without noise."""
    found = []
    for engine, options in (None, {}), (OpacusPrivacyEngine(), {"grad_sample_mode": "hooks"}):
        model = make_model()
        bounds = [0.05 * (index + 1) for index, _ in enumerate(model.parameters())]
        private, optimizer, _ = make_private(
            model, sgd(model), engine=engine, clipping="per_layer", max_grad_norm=bounds, **options
        )
        F.cross_entropy(private(X), Y).backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in private.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


# -- adaptive ----------------------------------------------------------------------------------------------------------


def adaptive(model: nn.Module, noise_multiplier: float = 0.0, **options):
    return make_private(
        model,
        sgd(model, lr=0.01),
        clipping="adaptive",
        max_grad_norm=options.pop("max_grad_norm", 5.0),
        noise_multiplier=noise_multiplier,
        **options,
    )


def test_the_adaptive_bound_goes_to_the_quantile_of_the_norms() -> None:
    model, optimizer, loader = adaptive(make_model(), target_unclipped_quantile=0.5, clipbound_learning_rate=0.5)
    for _ in range(30):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    norms = run_oracle(
        model, (make_data()[:][0], make_data()[:][1]), lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_grad_norm=1.0
    ).norms
    below = float((norms <= optimizer.engine.clip.max_grad_norm).double().mean())
    assert 0.3 <= below <= 0.7


def test_the_step_of_the_bound_is_that_of_opacus() -> None:
    """The geometric update of Andrew et al., without noise, for a batch of the expected size."""
    options = {
        "target_unclipped_quantile": 0.25,
        "clipbound_learning_rate": 0.3,
        "max_clipbound": 100.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 2.0,
    }
    found = []
    for engine, more in (None, {}), (OpacusPrivacyEngine(), {"grad_sample_mode": "hooks"}):
        model = make_model()
        private, optimizer, _ = make_private(
            model, sgd(model), engine=engine, clipping="adaptive", max_grad_norm=1.3, **options, **more
        )
        if engine is not None:
            optimizer.unclipped_num_std = 1e-9  # Opacus has noise on the count whatever the multiplier is
        x, y = make_data()[:16]
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        found.append(float(optimizer.max_grad_norm))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_noise_of_the_count_is_charged() -> None:
    """Sums with σ_sums and a count with 2·std compose to one Gaussian with σ: the ε that is told is that of σ."""
    _, optimizer, loader = adaptive(make_model(), noise_multiplier=1.0, unclipped_num_std=2.0)
    how = optimizer._privatisation()
    assert how.noise_std == pytest.approx(5.0 * (1 - 1 / 16) ** -0.5)
    (x, y) = next(iter(loader))
    F.cross_entropy(optimizer.engine.model(x), y).backward()
    optimizer.step()
    rule = optimizer.engine.clip
    assert rule.max_grad_norm != 5.0
    # Rényi divergences of Gaussians add up: 1/σ² = 1/σ_sums² + 1/(2 std)².
    assert rule.noise_multiplier(1.0) ** -2 + (2 * rule.unclipped_num_std) ** -2 == pytest.approx(1.0)
    expected = RDPAccountant()
    expected.step(noise_multiplier=1.0, sample_rate=16 / 64)
    assert optimizer.accountant.history == expected.history or [
        tuple(each) for each in optimizer.accountant.history
    ] == [(1.0, 0.25, 1)]


@pytest.mark.parametrize("passes", [2, 4])
def test_passes_that_are_accumulated_move_the_adaptive_bound_as_one_batch(passes: int) -> None:
    """The count is of all samples of the step, and its noise is drawn and accounted once."""
    model, optimizer, _ = adaptive(make_model(), noise_multiplier=1.0, target_unclipped_quantile=0.25, max_grad_norm=2)
    rule = optimizer.engine.clip
    noise: list[float] = []
    rule.count_noise = lambda normal: noise.append(3.0) or 3.0
    x, y = make_data()[: 16 * passes]
    for each, labels in zip(x.split(16), y.split(16), strict=True):
        F.cross_entropy(model(each), labels).backward()
    optimizer.step()
    norms = run_oracle(make_model(), (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_grad_norm=1.0).norms
    share = (float((norms <= 2.0).double().sum()) + 3.0) / len(x)
    assert rule.max_grad_norm == pytest.approx(2.0 * math.exp(-rule.rate * (share - rule.target)), rel=1e-6)
    assert noise == [3.0]
    assert optimizer.accountant.history == [(1.0, 0.25 * passes, 1)]


def test_the_noise_of_the_count_is_normal_and_none_of_that_of_the_sums() -> None:
    keys = [NoiseSource(torch.Generator().manual_seed(7)).draw(), *(NoiseSource().draw() for _ in range(4000))]
    found = torch.tensor([normal_of_count(key) for key in keys], dtype=torch.float64)
    assert len(found.unique()) == len(keys)
    assert float(found.mean()) == pytest.approx(0, abs=0.08)  # five deviations
    assert float(found.std()) == pytest.approx(1, abs=0.06)
    assert float(found.abs().max()) > 3
    assert normal_of_count(keys[0]) == float(found[0])
    values = torch.zeros(2**16, dtype=torch.float64)
    add_noise_([values], 1.0, 1.0, *keys[0])
    assert float((values - found[0]).abs().min()) > 0


def test_the_adaptive_bound_is_saved_with_the_optimizer() -> None:
    model, optimizer, _ = adaptive(make_model())
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    state = optimizer.state_dict()
    _, other, _ = adaptive(make_model())
    other.load_state_dict(state)
    assert other.max_grad_norm == optimizer.max_grad_norm != 5.0


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clipping", "bounds", "sentence"),
    [
        ("flatt", 1.0, "clipping must be one of flat"),
        ("flat", [1.0, 2.0], "max_grad_norm must be a finite number"),
        ("per_layer", [1.0], "1 bounds for 6 trained parameters"),
        ("per_group", 1.0, "dictionary"),
        ("per_group", {"nothing": 1.0}, "matches no pattern"),
        ("adaptive", -1.0, "above 0"),
    ],
)
def test_wrong_bounds_are_a_sentence(clipping, bounds, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        make_private(model := make_model(), sgd(model), clipping=clipping, max_grad_norm=bounds)


def test_a_pattern_that_matches_nothing_is_told() -> None:
    """Its bound makes the noise larger, and what it was meant for is in another group."""
    with pytest.warns(UserWarning, match=r'no trained parameter is in the group "\*nrom\*"'):
        FlashEngine(make_model(), clipping=PerGroup({"*nrom*": 0.1, "*": 1.0}))


def test_more_noise_than_the_count_can_pay_for_is_refused() -> None:
    with pytest.raises(UserError, match="larger unclipped_num_std"):
        Adaptive(1.0, unclipped_num_std=0.4).noise_multiplier(1.0)


def test_a_parameter_that_is_unfrozen_later_has_no_bound() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    with FlashEngine(model, clipping="per_layer") as engine:
        model[0].weight.requires_grad_(True)
        with pytest.raises(UserError, match=r"0\.weight was frozen"):
            private_step(engine, X, lambda m, x: m(x).sum(1))


def test_a_rule_of_ones_own_is_a_class() -> None:
    class Half(ClipRule):
        name = "half"

        def factors(self, norms, bounds):
            return (bounds / (2 * norms)).clamp(max=0.5)

    model = nn.Linear(FEATURES, CLASSES)
    with FlashEngine(model, clipping=Half(1.0)) as engine:
        private_step(engine, X, lambda m, x: m(x).sum(1))
    assert torch.allclose(engine.factors, (1 / (2 * engine.norms)).clamp(max=0.5))


class Unbounded(ClipRule):
    def factors(self, norms, bounds):
        return bounds / norms  # infinite for a norm of 0


class TooLarge(ClipRule):
    def factors(self, norms, bounds):
        return (bounds / norms).clamp(max=1) + 0.1


class ForgetsItsBounds(ClipRule):
    """Right until a scheduler changes the bound, or a CUDA graph is replayed with another."""

    def factors(self, norms, bounds):
        return (1 / norms).clamp(max=1)


class OfTheBatch(ClipRule):
    def factors(self, norms, bounds):
        return super().factors(norms, bounds) * (norms == norms.nan_to_num(0, 0).max())


class OfOtherGroups(PerGroup):
    """Exact where all groups are closed together, and unbounded where they are not, as in checkpointed blocks."""

    def factors(self, norms, bounds):
        return (self.sensitivity() / norms.nan_to_num(0, 0).norm(dim=0)).clamp(max=1) * torch.ones_like(norms)


class Understated(ClipRule):
    def sensitivity(self):
        return 0.5 * super().sensitivity()


class FreeCount(ClipRule):
    def observe(self, norms, finite, bounds):
        return finite.sum()


class WrongShape(ClipRule):
    def factors(self, norms, bounds):
        return super().factors(norms, bounds)[0]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Unbounded(), "Unbounded gives a sample of norm 0 the factor inf for the bound 1: its share may be at most"),
        (TooLarge(), "TooLarge .* may be at most sensitivity"),
        (ForgetsItsBounds(), "for the bound 0.1: its share may be at most"),
        (OfTheBatch(), "with the other samples of the batch"),
        (OfOtherGroups({"*bias": 3.0, "*": 4.0}), "with the norms of other groups"),
        (Understated(), "Understated .* may be at most sensitivity"),
        (FreeCount(), r"FreeCount releases a count \(observe\) that costs no privacy"),
        (WrongShape(), "WrongShape gives factors of shape"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("given_to", ["the engine", "make_private"])
def test_a_rule_that_does_not_hold_its_sensitivity_is_refused_when_it_is_given(rule, sentence, given_to) -> None:
    model = make_model()
    with pytest.raises(UserError, match=sentence):
        if given_to == "the engine":
            FlashEngine(model, clipping=rule)
        else:
            make_private(model, sgd(model), clipping=rule)


@pytest.mark.parametrize("name", CLIP_RULES)
def test_every_rule_of_the_table_passes_the_trial_of_rules_that_users_give(name: str, monkeypatch) -> None:
    rule = make_rule(name, bounds_of(name))
    rule.bind(["0.weight", "0.norm", "tokens"])
    monkeypatch.setattr(clip_rules, "CLIP_RULES", {})
    check_rule(rule, torch.device("cpu"))


class Doubled(ClipRule):
    def factors(self, norms, bounds):
        return (2 * bounds / norms).clamp(max=1)

    def sensitivity(self):
        return 2 * super().sensitivity()


def test_a_rule_with_a_sensitivity_of_its_own_keeps_its_bounds() -> None:
    model = make_model()
    _, optimizer, _ = make_private(model, sgd(model), clipping=Doubled(1.5), noise_multiplier=1.0)
    assert optimizer.engine.clip.bounds == [1.5]
    assert optimizer._privatisation().noise_std == optimizer.max_grad_norm == 3.0


@pytest.mark.parametrize(
    "rule", [PerLayer(1.0), PerGroup({"*bias": 0.6, "*": 0.8}), Adaptive(1.0)], ids=lambda r: r.name
)
def test_a_rule_that_is_given_twice_keeps_nothing_of_the_first_model(rule: ClipRule) -> None:
    engines = [FlashEngine(model, clipping=rule) for model in (nn.Linear(FEATURES, 2), make_model(), make_model())]
    engines[1].max_grad_norm = 0.1
    engines[1].clip.end_step(1.0, 2.0)
    for engine in engines[::2]:
        assert engine.max_grad_norm == pytest.approx(1.0)
        private_step(engine, X, lambda m, x: m(x).sum(1))
    again = FlashEngine(make_model(), clipping=engines[0].clip)  # a rule that an engine has
    assert again.max_grad_norm == pytest.approx(1.0)
    assert engines[1].max_grad_norm != pytest.approx(1.0)


def test_a_rule_needs_no_bound_beside_its_own() -> None:
    model = make_model()
    _, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=sgd(model), data_loader=make_loader(), noise_multiplier=1.0, clipping=PerLayer(2.0)
    )
    assert optimizer.max_grad_norm == pytest.approx(2.0)


def test_the_default_loader_still_trains() -> None:
    model = make_model()
    _, optimizer, loader = make_private(model, sgd(model), loader=make_loader(), clipping="automatic", gamma=0.1)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.engine.clip.gamma == 0.1

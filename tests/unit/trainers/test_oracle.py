"""Every private method against the dumbest oracle: micro-batches of one.

One sample at a time through plain autograd; the sample's gradient is clipped by its norm over all parameters; the
clipped gradients are summed and divided by the batch size. Nothing here is shared with the code under test but the
model and the loss.
"""

from __future__ import annotations

import math

import pytest
import torch

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.trainers.base import StandardTrainer, TrainerSettings
from dpscope.vocabulary.methods import methods
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload

PRIVATE_METHODS = [name for name, method in methods().items() if method.private]

BATCH = 6

WORKLOADS = {
    "transformer": (
        make_config("tiny", num_layers=2, hidden_dim=16, num_heads=2, vocab_size=40, max_seq_len=16),
        {"seq_len": 12},
    ),
    "cnn": (make_config("cnn", image_size=8), {}),
    "cnn with group norm": (make_config("cnn", image_size=8, norm="group"), {}),
}

# fp32 has 6e-8 relative rounding; sums over some thousand terms, in another order, stay well within this.
TOLERANCE = 1e-5

# The gradient is read off what plain SGD did to the parameters, so that it need not be kept anywhere. With a step
# this large the parameters' own size is lost in the rounding, and not the other way round.
LEARNING_RATE = 1e6

# A key's bias adds the same to every score of a query, which the softmax takes out again: its gradient is zero and
# what one sees of it is rounding. Such a parameter is held against the size of the whole gradient.
VANISHING = 1e-6


def spec_of(workload, method, **changes):
    config, size = WORKLOADS[workload]
    values = {"batch_size": BATCH, "optimizer": "sgd", "learning_rate": LEARNING_RATE, "seed": 3}
    values["noise_multiplier"] = 0.0
    return RunSpec(workload=config, method=method, **{**values, **size, **changes})


def model_batch_loss(spec):
    """The spec's model, batch and loss, without any trainer."""
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    torch.manual_seed(spec.seed)
    return workload.model(), workload.batch(spec.seed, torch.device("cpu")), workload.loss


def gradient_of_each_sample(spec):
    """One {parameter name: gradient} a sample."""
    model, batch, loss = model_batch_loss(spec)
    gradients = []
    for sample in range(spec.batch_size):
        model.zero_grad()
        loss(model, [part[sample : sample + 1] for part in batch]).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return gradients


def norm_of(gradient):
    return math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradient.values()))


def oracle(spec):
    """The private gradient without its noise, and the factor that each sample was clipped by."""
    gradients = gradient_of_each_sample(spec)
    factors = [min(1.0, spec.max_grad_norm / norm_of(gradient)) for gradient in gradients]
    total = {
        name: sum(factor * gradient[name] for factor, gradient in zip(factors, gradients, strict=True))
        for name in gradients[0]
    }
    return {name: g / spec.batch_size for name, g in total.items()}, factors


def step_and_step_back(trainer, batch):
    """The gradient that one step applied; the parameters are then as they were."""
    names = [name.removeprefix("_module.") for name, _ in trainer.model.named_parameters()]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step(batch)
    with torch.no_grad():
        moves = [(old - p) / LEARNING_RATE for old, p in zip(before, trainer.model.parameters(), strict=True)]
        for old, p in zip(before, trainer.model.parameters(), strict=True):
            p.copy_(old)
    return dict(zip(names, moves, strict=True))


def gradient_of_one_step(spec):
    return step_and_step_back(*make_trainer(spec))


def largest_difference(gradient, expected):
    """Over parameters: the norm of the difference relative to the norm of what was expected, and whose it is."""
    assert set(gradient) == set(expected)
    whole = norm_of(expected)
    relative = {}
    for name, g in expected.items():
        norm = float(g.norm())
        assert norm > VANISHING * whole or name.endswith("key.bias")
        relative[name] = float((gradient[name] - g).norm()) / (norm if norm > VANISHING * whole else whole)
    worst = max(relative, key=relative.get)
    return relative[worst], worst


CLIPPING = {"every sample": 0.01, "some samples": None, "no sample": 1e6}


@pytest.fixture(scope="module")
def clip_norm():
    """A max grad norm that clips every sample, none, or those above the middle of this workload's norms."""
    middles = {}

    def choose(workload, who):
        if CLIPPING[who] is not None:
            return CLIPPING[who]
        if workload not in middles:
            norms = sorted(norm_of(gradient) for gradient in gradient_of_each_sample(spec_of(workload, "standard")))
            middles[workload] = (norms[BATCH // 2 - 1] + norms[BATCH // 2]) / 2
        return middles[workload]

    return choose


@pytest.mark.parametrize("who", CLIPPING)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_one_step_without_noise_gives_the_gradient_of_micro_batches_of_one(clip_norm, method, workload, who):
    spec = spec_of(workload, method, max_grad_norm=clip_norm(workload, who))
    expected, factors = oracle(spec)
    clipped = sum(factor < 1 for factor in factors)
    assert clipped == {"every sample": BATCH, "some samples": BATCH // 2, "no sample": 0}[who]

    gradient = gradient_of_one_step(spec)

    difference, where = largest_difference(gradient, expected)
    assert difference < TOLERANCE, f"{where} is off by {difference:.1e}"
    if clipped:
        without_clipping, _ = oracle(spec_of(workload, method, max_grad_norm=1e6))
        assert largest_difference(gradient, without_clipping)[0] > 100 * TOLERANCE


def test_there_are_private_methods_to_hold_against_the_oracle():
    assert {"flat", "ghost"} <= set(PRIVATE_METHODS)


def test_clipping_bounds_what_a_step_can_move():
    """All samples clipped: the mean gradient is no longer than the clip norm, whatever the loss."""
    for method in PRIVATE_METHODS:
        gradient = gradient_of_one_step(spec_of("transformer", method, max_grad_norm=0.01))
        assert norm_of(gradient) <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_standard_training_takes_the_mean_gradient(workload):
    spec = spec_of(workload, "standard")
    gradients = gradient_of_each_sample(spec)
    expected = {name: sum(g[name] for g in gradients) / BATCH for name in gradients[0]}
    difference, where = largest_difference(gradient_of_one_step(spec), expected)
    assert difference < TOLERANCE, where


@pytest.mark.parametrize("method", ["standard", "flat", "ghost"])
def test_after_a_step_the_parameters_carry_the_gradient_that_was_applied(method):
    trainer, batch = make_trainer(spec_of("transformer", method, max_grad_norm=0.1, noise_multiplier=1.0))
    applied = step_and_step_back(trainer, batch)
    carried = {name.removeprefix("_module."): p.grad for name, p in trainer.model.named_parameters()}
    difference, where = largest_difference(carried, applied)
    assert difference < TOLERANCE, where


@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_the_noise_has_the_standard_deviation_that_privacy_asks_for(method):
    """sigma * C on the sum, so sigma * C / B on the mean. With n draws the estimate is off by about 1 / sqrt(2n)."""
    sigma, clip = 1.5, 0.4
    settings = {"max_grad_norm": clip}
    quiet = gradient_of_one_step(spec_of("cnn", method, **settings))
    noisy = gradient_of_one_step(spec_of("cnn", method, noise_multiplier=sigma, **settings))
    noise = torch.cat([(noisy[name] - quiet[name]).flatten() for name in quiet])
    expected = sigma * clip / BATCH
    error = 5 / math.sqrt(2 * noise.numel())  # five standard errors: one run in two million by chance
    assert float(noise.std()) == pytest.approx(expected, rel=error)
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(noise.numel())
    # It is drawn for every parameter, not for some of them.
    for name in quiet:
        assert float((noisy[name] - quiet[name]).norm()) > 0


@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_noise_repeats_with_its_seed_and_changes_from_step_to_step(method):
    def noise_of_two_steps(seed):
        # So much noise that the gradient is nothing beside it.
        trainer, batch = make_trainer(spec_of("cnn", method, noise_multiplier=1e6, max_grad_norm=1e-6, seed=seed))
        return [torch.cat([g.flatten() for g in step_and_step_back(trainer, batch).values()]) for _ in range(2)]

    first, second = noise_of_two_steps(seed=3)
    again, _ = noise_of_two_steps(seed=3)
    other, _ = noise_of_two_steps(seed=4)
    assert torch.equal(first, again)
    for different in (second, other):  # independent draws: the difference is longer than either
        assert float((first - different).norm() / first.norm()) == pytest.approx(math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_a_second_step_starts_from_nothing(method):
    """From the same parameters the second step's gradient equals the first's: nothing was left over to add up."""
    trainer, batch = make_trainer(spec_of("transformer", method, max_grad_norm=0.1))
    first, second = (step_and_step_back(trainer, batch) for _ in range(2))
    difference, where = largest_difference(second, first)
    assert difference < TOLERANCE, where


def test_the_loss_of_a_step_is_the_mean_over_samples():
    for method in ("standard", *PRIVATE_METHODS):
        spec = spec_of("transformer", method)
        model, batch, loss = model_batch_loss(spec)
        trainer, trainer_batch = make_trainer(spec)
        torch.testing.assert_close(trainer.train_step(trainer_batch), loss(model, batch).detach().mean())


@pytest.mark.parametrize("shape", [(), (BATCH, 3)])
def test_a_loss_that_is_not_one_number_a_sample_is_refused_with_what_to_do(shape):
    model = torch.nn.Linear(3, 1)

    def loss(model, batch):
        return (model(batch).sum() * torch.ones(shape)).reshape(shape)

    trainer = StandardTrainer(model, loss, TrainerSettings(batch_size=BATCH))
    with pytest.raises(UserError, match=r"one loss per sample, shape \(batch,\).* use reduction='none'"):
        trainer.train_step(torch.ones(BATCH, 3))


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, x: model(x).sum(1).detach(), "the loss is detached from the model"),
        (lambda model, x: torch.ones(len(x), dtype=torch.long), "the loss is detached from the model"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused_in_a_sentence(loss, sentence):
    trainer = StandardTrainer(torch.nn.Linear(3, 2), loss, TrainerSettings(batch_size=2))
    with pytest.raises(UserError, match=sentence):
        trainer.train_step(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (torch.nn.Identity(), "no parameter that requires a gradient: there is nothing to train"),
        (torch.nn.Linear(3, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (3, "must be an nn.Module, but it is int 3"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_a_sentence(model, sentence):
    with pytest.raises(UserError, match=sentence):
        StandardTrainer(model, lambda model, x: model(x).sum(1), TrainerSettings(batch_size=2))

"""A logical batch of several physical ones is one step: the same sum, one noise, one division."""

from __future__ import annotations

import math

import pytest
import torch

from dpscope.errors import UserError
from dpscope.runner.steps import assemble
from dpscope.trainers.base import StandardTrainer
from dpscope.vocabulary.methods import methods
from tests.unit.trainers.steps import applied_sums, assert_agree, oracle_sums, spec_of, sums_of_a_step

METHODS = list(methods())
PRIVATE = [name for name, method in methods().items() if method.private]


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_logical_batch_gives_the_sum_of_all_its_samples(method, accumulate):
    spec = spec_of("transformer", method, accumulate=accumulate, max_grad_norm=2.4)  # some exceed it, some do not
    wanted = oracle_sums(spec)
    trainer, batches = assemble(spec)
    assert len(batches) == accumulate
    assert not torch.equal(batches[0][0], batches[1][0])
    for _ in range(2):  # nothing is left over for the next step
        assert_agree(applied_sums(trainer, batches, spec.logical_batch_size), wanted)


@pytest.mark.parametrize("method", PRIVATE)
def test_noise_is_added_once_a_logical_batch(method):
    """Deviation σC on the sum. With n draws the estimate is off by about 1/sqrt(2n): five of those are allowed."""
    quiet, noisy = (
        sums_of_a_step(spec_of("transformer", method, accumulate=3, max_grad_norm=0.5, noise_multiplier=sigma))
        for sigma in (0.0, 2.0)
    )
    noise = torch.cat([(noisy[name] - quiet[name]).flatten() for name in quiet])
    assert float(noise.std()) == pytest.approx(2.0 * 0.5, rel=5 / math.sqrt(2 * noise.numel()))


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_a_step_is_that_of_all_its_batches(method):
    trainer, batches = assemble(spec_of("transformer", method, accumulate=2, learning_rate=1e-9))
    losses = [float(assemble(spec_of("transformer", method, seed=3))[0].train_step(batch)) for batch in batches]
    assert float(trainer.train_step(*batches)) == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.parametrize("budget", ["auto", "lean"])
def test_checkpointed_blocks_and_logical_batches_go_together(budget):
    settings = {"accumulate": 2, "checkpoint_blocks": True, "memory_budget": budget}
    spec = spec_of("transformer", "flash", max_grad_norm=2.4, **settings)
    assert_agree(sums_of_a_step(spec), oracle_sums(spec))


class StepEveryTime(StandardTrainer):
    """A method of somebody's that knows nothing of logical batches: adding up `.grad` may be wrong for it."""


def test_a_method_that_cannot_accumulate_says_so():
    trainer, batches = assemble(spec_of("transformer", "standard", accumulate=2))
    other = StepEveryTime(trainer.plain_model, trainer.loss, trainer.settings)
    with pytest.raises(UserError, match=r"StepEveryTime takes a step after every batch: .* leave out --accumulate"):
        other.train_step(*batches)

"""Checkpoints of private training: noise goes on, or is drawn anew, and is never repeated."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.flash.privacy_spent import HISTORY
from tests.unit.flash.private_training import (
    make_data,
    make_model,
    make_private,
    sgd,
    step,
)


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
    assert set(saved) == {*optimizer.original_optimizer.state_dict(), HISTORY}
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

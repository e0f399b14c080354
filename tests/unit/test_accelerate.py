"""Accelerate: the steps of a plain private loop, and checkpoints that keep ε."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from tests.unit.flash.private_training import make_data, make_loader, make_model, sgd
from tests.unit.two_ranks import fork_ranks

pytest.importorskip("accelerate")

import accelerate

from dpscope.accelerate import prepare_private
from tests.unit.accelerate_rank import PRIVACY, main, prepared, train


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


def test_steps_are_those_of_a_plain_private_loop(accelerator):
    model, optimizer, loader, engine = prepared(accelerator)
    train(accelerator, model, optimizer, loader)
    plain = make_model()
    torch.manual_seed(0)
    own_loader = DataLoader(make_data(), batch_size=16, generator=torch.Generator().manual_seed(1))
    plain, own, batches = PrivacyEngine().make_private(
        module=plain,
        optimizer=sgd(plain),
        data_loader=own_loader,
        noise_generator=torch.Generator().manual_seed(1),
        **PRIVACY,
    )
    for x, y in batches:
        own.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        own.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(1e-5) > 0


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(accelerator, tmp_path):
    model, optimizer, loader, _ = prepared(accelerator)
    train(accelerator, model, optimizer, loader)
    fork_ranks(main, tmp_path)
    two = torch.load(tmp_path / "two.pt")
    assert two["processes"] == 2
    assert two["history"] == [(1.0, 0.25, 4)]
    for ours, theirs in zip(two["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_saved_state_keeps_the_privacy_that_was_spent(accelerator, tmp_path):
    model, optimizer, loader, engine = prepared(accelerator)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(tmp_path))
    weights = copy.deepcopy(model.state_dict())
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    model, optimizer, loader, again = prepared(accelerator, seed=2)
    accelerator.load_state(str(tmp_path))
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    train(accelerator, model, optimizer, loader)
    assert again.accountant.history == [(1.0, 0.25, 8)]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(accelerator, tmp_path):
    draws = {"pad_batches": 4}  # physical batches of a quarter of the logical one

    def evaluated(model):
        with torch.no_grad():
            return F.cross_entropy(model(make_data().tensors[0]), make_data().tensors[1]).item()

    def steps(loop, epochs):
        model, optimizer, loader, engine = loop
        for _ in range(epochs):
            train(accelerator, model, optimizer, loader)
            evaluated(model)
        return model, engine

    whole, spent = steps(prepared(accelerator, **draws), 3)
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    steps(prepared(accelerator, **draws), 2)
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    again = prepared(accelerator, seed=2, **draws)
    accelerator.load_state(str(tmp_path))
    resumed, engine = steps(again, 1)
    assert engine.get_epsilon(1e-5) == spent.get_epsilon(1e-5)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_target_chooses_the_noise(accelerator):
    *_, engine = prepare_private(
        accelerator,
        model := make_model(),
        sgd(model),
        make_loader(),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=0.5,
    )
    assert engine.spending.planned == 4


def test_what_accelerate_would_do_behind_the_back_is_refused(accelerator):
    with pytest.raises(UserError, match="prepared by Accelerate"):
        prepare_private(accelerator, model := make_model(), sgd(model), accelerator.prepare(make_loader()), **PRIVACY)
    model, optimizer = accelerator.prepare(model := make_model(), sgd(model))
    with pytest.raises(UserError, match="prepared or private already"):
        prepare_private(accelerator, model, optimizer, make_loader(), **PRIVACY)


def test_accumulation_is_refused():
    accumulating = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(UserError, match="gradient_accumulation_steps=2"):
        prepare_private(accumulating, model := make_model(), sgd(model), make_loader(), **PRIVACY)
    accelerate.state.AcceleratorState._reset_state(True)

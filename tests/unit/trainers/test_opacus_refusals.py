"""What Opacus cannot train is a sentence that names the module; what is nobody's refusal stays an error."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from dpscope.endings import outcome_of_exception
from dpscope.errors import UserError
from dpscope.exactness.check import check
from dpscope.trainers.base import TrainerSettings, load_trainer
from dpscope.vocabulary.methods import resolve_method
from tests.unit.trainers.refused_models import BATCH, REFUSED, WORKS, Positions, calling, features, workload

CASES = [(name, method) for name, (_, methods, _) in REFUSED.items() for method in methods]


def train(work, method, steps=2):
    trainer = load_trainer(resolve_method(method))(work.model(), work.loss, TrainerSettings(batch_size=BATCH))
    batch = work.batch(0, torch.device("cpu"))
    for _ in range(steps):
        trainer.train_step(batch)
    return trainer


@pytest.mark.parametrize(("name", "method"), CASES)
def test_what_opacus_cannot_train_is_a_sentence(name, method):
    work, _, sentence = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        train(work, method)
    assert re.search(sentence, str(refusal.value))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [name for name, (_, methods, _) in REFUSED.items() if methods == ("ghost",)])
def test_what_ghost_clipping_alone_refuses_flat_clipping_trains(name):
    train(REFUSED[name][0], "flat")


@pytest.mark.parametrize("name", WORKS)
def test_inputs_and_outputs_that_opacus_can_follow_are_trained_exactly(name):
    for found in check(WORKS[name], ["flat", "ghost"], neighbours=False).methods:
        assert found.verdict == "exact", (found.method, found.reason, found.faults)


@pytest.mark.parametrize("name", ["MultiheadAttention", "a dictionary for a bare parameter", "a folded batch"])
def test_check_and_a_row_of_a_comparison_give_the_same_status_and_sentence(name):
    work, methods, _ = REFUSED[name]
    checked = {
        found.method: (found.verdict, found.reason) for found in check(work, list(methods), neighbours=False).methods
    }
    for method in methods:
        with pytest.raises(UserError) as refusal:
            train(work, method)
        assert checked[method] == outcome_of_exception(refusal.value)


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_a_bug_in_the_users_model_stays_their_error(method):
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        train(workload(calling(lambda self, x: self.nothing(x))), method)


@pytest.mark.parametrize("raised", [ZeroDivisionError("odd"), RuntimeError("CUDA error: unspecified launch failure")])
def test_an_error_that_nobody_knows_stays_what_it_is(monkeypatch, raised):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr("opacus.grad_sample.grad_sample_module.create_or_accumulate_grad_sample", fail)
    with pytest.raises(type(raised), match=str(raised)):
        train(workload(Positions), "flat")
    assert outcome_of_exception(raised)[0] == "failed"


def test_out_of_memory_inside_opacus_is_no_refusal(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("opacus.grad_sample.grad_sample_module.ft_compute_per_sample_gradient", fail)
    with pytest.raises(torch.OutOfMemoryError):
        train(workload(Positions), "flat")


def test_calls_are_looked_at_in_the_first_step_only():
    trainer = train(workload(Positions), "flat", steps=1)
    assert trainer.first_calls is None
    hooks = [len(module._forward_pre_hooks) for module in trainer.plain_model.modules()]
    assert sum(hooks) == 0


def test_the_first_step_is_what_it_is_without_being_looked_at(monkeypatch):
    def first_gradient():
        torch.manual_seed(0)
        trainer = load_trainer(resolve_method("flat"))(
            nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)),
            lambda model, x: model(x).flatten(1).square().mean(1),
            TrainerSettings(batch_size=BATCH, noise_multiplier=0.0),
        )
        trainer.train_step(features(0, "cpu"))
        return trainer.plain_model[1].weight.grad

    watched = first_gradient()
    monkeypatch.setattr("dpscope.trainers.opacus_refusals.CallWatch._watch", lambda *_: [])
    assert torch.equal(watched, first_gradient())

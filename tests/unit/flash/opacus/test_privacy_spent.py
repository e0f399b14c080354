"""Privacy that was spent is kept in every checkpoint, and ε that does not hold is doubted."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint
import torch.nn.functional as F
from opacus.accountants import create_accountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

from dpscope.flash import PrivacyEngine, TrainingState
from dpscope.flash.opacus.privacy_spent import continued
from dpscope.privacy_budget import epsilon_of, steps_left
from tests.unit.flash.private_training import make_data, make_loader, make_model, sgd, step


def private(**options):
    engine, model = PrivacyEngine(), make_model()
    made = engine.make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=make_loader(),
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, **options},
    )
    return engine, *made


def train(model, optimizer, batches):
    for x, y in batches:
        step(model, optimizer, x, y)


@pytest.mark.parametrize(
    ("now", "saved", "both"),
    [
        ([], [(1.0, 0.1, 4)], [(1.0, 0.1, 4)]),
        ([(1.0, 0.1, 9)], [(1.0, 0.1, 4)], [(1.0, 0.1, 9)]),  # this run saved it and went on
        ([(1.0, 0.1, 4)], [(1.0, 0.1, 9)], [(1.0, 0.1, 9)]),
        ([(1.0, 0.1, 4), (2.0, 0.1, 1)], [(1.0, 0.1, 4)], [(1.0, 0.1, 4), (2.0, 0.1, 1)]),
        ([(1.0, 0.1, 4)], [(1.0, 0.2, 9)], [(1.0, 0.2, 9), (1.0, 0.1, 4)]),  # other steps on the data: both count
        ([(1.0, 0.1, 4)], [], [(1.0, 0.1, 4)]),
    ],
)
def test_a_loaded_history_never_makes_the_sum_smaller(now, saved, both):
    assert continued(now, saved) == both


def test_any_framework_that_saves_the_optimizer_saves_epsilon(tmp_path):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "any.pt")
    again, model, optimizer, loader = private()
    saved = torch.load(tmp_path / "any.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    train(model, optimizer, loader)
    assert again.accountant.history == [(1.0, 0.25, 8)]
    optimizer.load_state_dict(saved["optimizer"])  # back to an earlier state: what was spent is spent
    assert again.accountant.history == [(1.0, 0.25, 8)]


@pytest.mark.parametrize("how", ["checkpoint", "checkpoint without the optimizer", "TrainingState"])
def test_going_back_to_a_checkpoint_gives_no_privacy_back(how, tmp_path):
    engine, model, optimizer, loader = private()
    if how == "TrainingState":
        state = {"training": TrainingState(model, optimizer, engine)}
        save = partial(torch.distributed.checkpoint.save, state, checkpoint_id=tmp_path)
        load = partial(torch.distributed.checkpoint.load, state, checkpoint_id=tmp_path)
    else:
        with_optimizer = {"optimizer": optimizer} if how == "checkpoint" else {}
        files = {"path": tmp_path / "run.pt", "module": model, **with_optimizer}
        save, load = partial(engine.save_checkpoint, **files), partial(engine.load_checkpoint, **files)
    train(model, optimizer, loader)
    save()
    train(model, optimizer, loader)
    load()
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 12)]


def test_steps_without_noise_have_no_finite_epsilon():
    engine, model, optimizer, loader = private(noise_multiplier=0.0)
    train(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) == math.inf


def test_a_distributed_checkpoint_keeps_the_bound_that_adapts(tmp_path):
    engine, model, optimizer, loader = private(clipping="adaptive")
    train(model, optimizer, loader)
    state = {"training": TrainingState(model, optimizer, engine)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path)
    bound = optimizer.max_grad_norm
    engine, model, optimizer, _ = private(clipping="adaptive")
    torch.distributed.checkpoint.load({"training": TrainingState(model, optimizer, engine)}, checkpoint_id=tmp_path)
    assert optimizer.max_grad_norm == bound != 0.5


def test_a_state_without_a_history_is_warned_of():
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.randn(2, 8)), torch.tensor([0, 1])).backward()
    adam.step()
    state = adam.state_dict()
    engine = PrivacyEngine()
    _, optimizer, _ = engine.make_private(
        module=model, optimizer=adam, data_loader=make_loader(), noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.warns(UserWarning, match="holds no privacy history"):
        optimizer.load_state_dict(state)


def test_batches_of_another_loader_are_told_each_time_epsilon_is_asked_for():
    engine, model, optimizer, _ = private()
    train(model, optimizer, DataLoader(make_data(), batch_size=16))
    for _ in range(2):
        with pytest.warns(UserWarning, match="4 of 4 private steps were taken on batches that did not come from the"):
            engine.get_epsilon(1e-5)


@pytest.mark.parametrize("options", [{}, {"pad_batches": True}])
def test_the_private_loader_is_not_doubted_however_its_batches_are_cut(options):
    engine, model, optimizer, loader = private(**options)
    for _ in range(2):
        train(model, optimizer, loader)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as cut:
        train(model, optimizer, cut)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.get_epsilon(1e-5)


def test_steps_beyond_those_of_the_target_are_told():
    engine, model = PrivacyEngine(), make_model()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=sgd(model),
        data_loader=make_loader(),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    train(model, optimizer, loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(1e-5) <= 3.0
    with pytest.warns(UserWarning, match="chosen for 4 steps to stay within target_epsilon=3, and step 5 was taken"):
        train(model, optimizer, loader)
    with pytest.warns(UserWarning, match="ε is larger than the target"):
        assert engine.get_epsilon(1e-5) > 3.0


class Reshaping(torch.nn.Module):
    """Cannot take a batch of none, as attention of Hugging Face cannot."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x.view(len(x), -1, 4)).sum(1)


def test_an_empty_draw_is_a_step_of_noise_for_a_model_that_cannot_take_it():
    """The sample that is made up for it has no share, also where no step lies between it and the next batch."""
    model = Reshaping()
    engine = PrivacyEngine()
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=8)
    model, optimizer, _ = engine.make_private(
        module=model, optimizer=sgd(model), data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.5
    )
    x = torch.randn(3, 8)
    for batch in (x, x[:0], x):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        model(batch).square().sum(1).sum().backward()
        optimizer.step()
        moved = any(not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
        assert moved == (len(batch) > 0)
    assert engine.accountant.history == [(0.0, 0.25, 3)]
    optimizer.zero_grad()
    model(x[:0]).square().sum().backward()
    model(x)  # closes the batch before it
    assert optimizer.engine.norms.numel() == 0


HOOKS = {
    "another hook": lambda engine, optimizer: optimizer.attach_step_hook(lambda each: None),
    "no hook": lambda engine, optimizer: optimizer.attach_step_hook(None),
    "another accountant's hook": lambda engine, optimizer: optimizer.attach_step_hook(
        create_accountant("rdp").get_optimizer_hook_fn(sample_rate=0.25)
    ),
    "a hook around the first": lambda engine, optimizer: optimizer.attach_step_hook(
        lambda each, first=optimizer.step_hook: first(each)
    ),
    "the accountant's hook once more": lambda engine, optimizer: optimizer.attach_step_hook(
        engine.accountant.get_optimizer_hook_fn(sample_rate=0.25)
    ),
}


@pytest.mark.parametrize("change", HOOKS.values(), ids=HOOKS.keys())
@pytest.mark.parametrize("mechanism", ["rdp", "gdp"])
@pytest.mark.parametrize("fused", [True, False])
def test_every_step_is_counted_once_whatever_becomes_of_the_hook(mechanism, change, fused):
    engine, model = PrivacyEngine(accountant=mechanism), make_model()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=make_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        fused=fused,
    )
    train(model, optimizer, loader)
    change(engine, optimizer)
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 0.25, 8)]
    assert engine.spending.steps == 8


@pytest.mark.parametrize("lost", ["replaced", "cleared"])
def test_steps_that_the_accountant_does_not_know_are_told_each_time_epsilon_is_asked_for(lost):
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    if lost == "replaced":
        engine.accountant = create_accountant("rdp")
    else:
        engine.accountant.history.clear()
    train(model, optimizer, loader)
    for _ in range(2):
        with pytest.warns(UserWarning, match="knows of . steps, and 8 private steps were taken: ε is larger"):
            engine.get_epsilon(1e-5)


# -- steps that a target ε allows --------------------------------------------------------------------------------------

TARGET = {"noise_multiplier": 2.0, "sample_rate": 0.1, "epsilon": 3.0, "delta": 1e-5}


@pytest.mark.parametrize("mechanism", ["rdp", "gdp"])
@pytest.mark.parametrize("spent", [0, 5])
def test_one_step_more_would_be_too_much(mechanism, spent):
    accountant = create_accountant(mechanism)
    accountant.history = [(2.0, 0.1, spent)] if spent else []
    left = steps_left(accountant, **TARGET)
    assert left > 0
    for steps, fits in ((left, True), (left + 1, False)):
        accountant.history = [(2.0, 0.1, spent + steps)]
        assert (accountant.get_epsilon(1e-5) <= 3.0) == fits


def test_a_spent_budget_allows_none():
    accountant = create_accountant("rdp")
    accountant.history = [(1.0, 0.1, 10_000)]
    assert steps_left(accountant, **TARGET) == 0
    assert steps_left(create_accountant("rdp"), **{**TARGET, "noise_multiplier": 0.0}) == 0


@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
def test_epsilon_is_the_accountants_own(mechanism):
    accountant = create_accountant(mechanism)
    accountant.history = [(1.5, 0.02, 300)] if mechanism == "gdp" else [(1.5, 0.02, 300), (0.9, 0.05, 7)]
    for delta in (1e-5, 1e-3):
        assert epsilon_of(accountant, delta) == pytest.approx(accountant.get_epsilon(delta=delta), rel=1e-12)

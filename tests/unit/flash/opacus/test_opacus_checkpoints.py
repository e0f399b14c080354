"""Checkpoints of private training: noise goes on, or is drawn anew, and is never repeated."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine, TrainingState
from dpscope.flash.opacus.privacy_spent import OLD_HISTORY, OLD_NOISE, PRIVATE_RUN
from dpscope.flash.update import noise_source
from dpscope.flash.update.noise_source import UsedKeys
from tests.unit.flash.private_training import (
    make_data,
    make_model,
    make_private,
    sgd,
    step,
)


class Seeded:
    """A private run whose noise comes from a given generator; always the same batch."""

    def __init__(
        self,
        seed: int | None = 11,
        fused: bool | None = None,
        generator: torch.Generator | None = None,
        before: dict | None = None,
        **options,
    ) -> None:
        self.engine = PrivacyEngine()
        self.model = make_model()
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        if before is not None:
            adamw.load_state_dict(before)
        self.model, self.optimizer, _ = make_private(
            self.model,
            adamw,
            self.engine,
            noise_multiplier=1.0,
            noise_generator=generator or (None if seed is None else torch.Generator().manual_seed(seed)),
            fused=fused,
            **options,
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


REPEATED = "the key of an earlier step again"


@pytest.mark.parametrize("fused", [True, False])
def test_a_generator_that_is_seeded_anew_between_steps_is_refused_and_the_weights_stay(fused: bool) -> None:
    run = Seeded(fused=fused, clipping="adaptive")
    weights, bound = run.steps(2), run.optimizer.max_grad_norm
    run.optimizer.noise.generator.manual_seed(11)
    with pytest.raises(UserError, match=REPEATED):
        run.steps(1)
    assert torch.equal(run.model[0].weight, weights)
    assert run.optimizer.max_grad_norm == bound  # the noise of its count is that of the key, too


def test_torchs_generator_seeded_in_every_epoch_is_refused() -> None:
    run = Seeded(generator=torch.default_generator)
    torch.manual_seed(0)
    run.steps(2)
    torch.manual_seed(0)
    with pytest.raises(UserError, match=REPEATED):
        run.steps(1)


def test_without_noise_nothing_is_repeated() -> None:
    run = Seeded()
    run.optimizer.noise_multiplier = 0.0
    run.steps(1)
    run.optimizer.noise.generator.manual_seed(11)
    run.steps(1)


def test_the_same_model_made_private_anew_with_the_same_seed_is_refused() -> None:
    run = Seeded()
    run.steps(1)
    seeded = torch.Generator().manual_seed(11)
    run.model, run.optimizer, _ = make_private(
        run.model, run.optimizer, run.engine, noise_multiplier=1.0, noise_generator=seeded
    )
    with pytest.raises(UserError, match=REPEATED):
        run.steps(1)


def restore(other: Seeded, how: str, saved: io.BytesIO, states: dict[str, dict]) -> None:
    if how == "without the optimizer":
        saved.seek(0)
        other.engine.load_checkpoint(path=saved, module=other.model)
    elif how == "the wrapped optimizer alone":
        other.optimizer.original_optimizer.load_state_dict(states["private"])
    else:
        other.optimizer.original_optimizer.load_state_dict(states["wrapped"])


@pytest.mark.filterwarnings("ignore:optimizer_state_dict has")
@pytest.mark.parametrize(
    "how", ["without the optimizer", "the wrapped optimizer alone", "saved and restored by the wrapped optimizer"]
)
def test_however_a_run_is_restored_its_noise_is_not_repeated(how: str) -> None:
    run = Seeded()
    run.steps(2)
    states = {"private": run.optimizer.state_dict(), "wrapped": run.optimizer.original_optimizer.state_dict()}
    other = Seeded()
    with pytest.raises(UserError, match=f"{REPEATED}|would add its noise again"):
        restore(other, how, run.save(), states)
        other.steps(1)
    fresh = Seeded(seed=12)
    restore(fresh, how, run.save(), states)
    fresh.steps(1)


@pytest.mark.parametrize("whose", ["private", "wrapped"])
def test_a_state_that_an_ordinary_optimizer_loads_brings_its_privacy_and_its_noise(whose: str) -> None:
    def resumed(seed: int) -> PrivacyEngine:
        model, engine = make_model(), PrivacyEngine()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.load_state_dict(state)  # before make_private
        generator = torch.Generator().manual_seed(seed)
        make_private(model, optimizer, engine, noise_multiplier=1.0, noise_generator=generator)
        return engine

    run = Seeded()
    run.steps(2)
    file = io.BytesIO()
    torch.save((run.optimizer if whose == "private" else run.optimizer.original_optimizer).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert resumed(seed=12).accountant.history == run.engine.accountant.history == [(1.0, 0.25, 2)]
    with pytest.raises(UserError, match="would add its noise again"):
        resumed(seed=11)


def test_a_checkpoint_saved_without_the_optimizer_remembers_the_noise_too() -> None:
    run, path = Seeded(), io.BytesIO()
    run.steps(1)
    run.engine.save_checkpoint(path=path, module=run.model)
    other = Seeded()
    path.seek(0)
    other.engine.load_checkpoint(path=path, module=other.model)
    with pytest.raises(UserError, match=REPEATED):
        other.steps(1)


@pytest.mark.parametrize("middle", [8, None])
def test_a_chain_of_resumed_runs_remembers_the_noise_of_all_of_them(middle: int | None) -> None:
    first, second = Seeded(seed=7), Seeded(seed=middle)
    first.steps(2)
    second.load(first.save())
    second.steps(1)
    with pytest.raises(UserError, match="would add its noise again"):
        Seeded(seed=7).load(second.save())
    Seeded(seed=9).load(second.save())


def default_run() -> Seeded:
    """As the documentation says: a seed at the top, then the model, whose weights are drawn by the same generator."""
    torch.manual_seed(0)
    return Seeded(generator=torch.default_generator)


def test_torchs_generator_seeded_at_the_top_of_a_resumed_script_is_refused() -> None:
    run = default_run()
    run.steps(3)
    with pytest.raises(UserError, match="would add its noise again"):
        default_run().load(run.save())


def test_a_key_that_comes_later_in_a_resumed_run_is_refused_where_it_comes() -> None:
    """Something else is drawn first, so that the generator stands elsewhere when the state is loaded."""
    run = Seeded()
    run.steps(2)
    saved = run.save()
    other = Seeded(seed=12)
    other.load(saved)
    other.steps(1)
    other.optimizer.noise.generator.manual_seed(11)
    with pytest.raises(UserError, match=REPEATED):
        other.steps(1)


def test_resuming_the_noise_forgets_what_was_used_after_the_checkpoint() -> None:
    run = Seeded()
    run.steps(1)
    saved = run.save()
    expected = run.steps(1)
    run.load(saved, resume_noise=True)
    torch.testing.assert_close(run.steps(1), expected, rtol=0, atol=0)


def test_a_checkpoint_of_before_keys_were_remembered_is_held_against_its_seed() -> None:
    run = Seeded()
    run.steps(2)
    old = run.optimizer.original_optimizer.state_dict()
    del old["param_groups"][0][PRIVATE_RUN]
    old[OLD_NOISE] = {"seed": 11, "draws": 2, "generator": run.optimizer.noise.generator.get_state()}
    with pytest.raises(UserError, match="would add its noise again"):
        Seeded().optimizer.load_state_dict(old)
    Seeded(seed=12).optimizer.load_state_dict(old)


def test_used_keys_take_a_bounded_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_source, "REMEMBERED_KEYS", 3)
    used = UsedKeys()
    for number in range(5):
        used.add((number, 0))
    assert len(used) == 3 and (4, 0) in used and (1, 0) not in used


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
    assert saved.keys() == torch.optim.SGD(model.parameters()).state_dict().keys()
    run = json.loads(saved["param_groups"][0][PRIVATE_RUN])
    assert run == {"history": [[1.0, 0.25, 1]], "bounds": [], "used": [], "generator": None}
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


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_private_model_is_an_ordinary_model(duplicate) -> None:
    private, optimizer, loader = make_private(model := make_model(), sgd(model))
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    twin = duplicate(private)
    twin.load_state_dict(private.state_dict())
    assert optimizer.engine.ranks._loads == 0  # of the private model: ranks compare it, and a copy may be on one
    twin(x).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    step(private, optimizer, x, y)


# -- every way of saving and going on ----------------------------------------------------------------------------------

WAYS = ("the optimizer", "the wrapped optimizer", "before make_private", "a checkpoint", "TrainingState")


def go_on(way: str, run: Seeded, folder, *, resume: bool = False, **options) -> Seeded:
    """Save a run in one way and load it into a new one."""
    if way == "before make_private":
        return Seeded(before=run.optimizer.original_optimizer.state_dict(), **options)
    other = Seeded(**options)
    if way == "the optimizer":
        file = io.BytesIO()
        torch.save(run.optimizer.state_dict(), file)
        file.seek(0)
        other.optimizer.load_state_dict(torch.load(file, weights_only=True), resume_noise=resume)
    elif way == "the wrapped optimizer":
        other.optimizer.resumes_noise = resume
        other.optimizer.original_optimizer.load_state_dict(copy.deepcopy(run.optimizer.original_optimizer.state_dict()))
    elif way == "a checkpoint":
        other.load(run.save(), resume_noise=resume)
    else:
        dcp = torch.distributed.checkpoint
        dcp.save({"run": TrainingState(run.model, run.optimizer, run.engine)}, checkpoint_id=folder)
        state = TrainingState(other.model, other.optimizer, other.engine, resume_noise=resume)
        dcp.load({"run": state}, checkpoint_id=folder)
    other.model.load_state_dict(run.model.state_dict())
    return other


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_saving_keeps_epsilon_the_bound_and_the_noise_that_was_used(way: str, tmp_path) -> None:
    run = Seeded(clipping="adaptive")
    run.steps(2)
    with pytest.raises(UserError, match="would add its noise again"):
        go_on(way, run, tmp_path / "same", clipping="adaptive")
    other = go_on(way, run, tmp_path / "other", seed=12, clipping="adaptive")
    assert other.engine.accountant.history == run.engine.accountant.history == [(1.0, 0.25, 2)]
    assert other.optimizer.max_grad_norm == run.optimizer.max_grad_norm != 0.5
    other.optimizer.noise.generator.manual_seed(11)
    with pytest.raises(UserError, match=REPEATED):
        other.steps(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "before make_private"])
def test_every_way_of_saving_continues_the_noise_if_told_to(way: str, clipping: str, tmp_path) -> None:
    run = Seeded(clipping=clipping)
    run.steps(2)
    other = go_on(way, run, tmp_path, resume=True, clipping=clipping)
    assert torch.equal(other.steps(2), run.steps(2))
    assert other.optimizer.max_grad_norm == run.optimizer.max_grad_norm
    assert other.optimizer.noise.used.state() == run.optimizer.noise.used.state()


def test_a_state_of_an_earlier_version_brings_its_privacy() -> None:
    run = Seeded(seed=None)
    old = run.optimizer.original_optimizer.state_dict()
    del old["param_groups"][0][PRIVATE_RUN]
    other = Seeded(seed=None)
    other.optimizer.load_state_dict({**old, OLD_HISTORY: [(1.0, 0.25, 7)]})
    assert other.engine.accountant.history == [(1.0, 0.25, 7)]

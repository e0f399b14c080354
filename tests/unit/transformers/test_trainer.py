"""The private Trainer: its steps are those of a plain private loop, and every step is accounted for."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.transformers.steps import sample_losses
from tests.unit.transformers.small_training import (
    LOGICAL,
    SAMPLES,
    Counting,
    arguments,
    assert_same,
    collate,
    logged,
    private_trainer,
    small_llama,
    weights,
)


def plain_loop(trainer, draws, *, noise_multiplier, lr):
    """The same draws, each as one batch, through make_private and a loop that a person would write."""
    model = small_llama()
    decayed = trainer.get_decay_parameter_names(model)  # elements are numbered for noise in the optimizer's order
    named = sorted(model.named_parameters(), key=lambda each: each[0] not in decayed)
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=lr)
    loader = DataLoader(Counting(), batch_size=LOGICAL, collate_fn=collate)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(5),
    )
    data = Counting()
    for draw in draws:
        batch = collate([data[index] for part in draw for index in part])
        optimizer.zero_grad()
        labels = batch.pop("labels")
        sample_losses(model, model(**batch), labels).mean().backward()
        optimizer.step()
    return model


class Watched:
    """The draws that a trainer's sampler gives."""

    def __init__(self, trainer):
        self.draws = []
        prepare = trainer._make_private

        def make_private(*args):
            prepare(*args)
            sampler = trainer._loader.batch_sampler
            inner = sampler.sampler

            class Recording:
                def __len__(self):
                    return len(inner)

                def __iter__(inner_self):
                    for draw in inner:
                        self.draws.append([list(draw)])
                        yield draw

            sampler.sampler = Recording()

        trainer._make_private = make_private


def test_steps_are_those_of_a_plain_private_loop_on_the_same_draws(tmp_path):
    optimizer = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    trainer = private_trainer(tmp_path, settings=optimizer)
    watched = Watched(trainer)
    trainer.train()
    assert len(watched.draws) == 4
    assert max(len(draw[0]) for draw in watched.draws) > 4, "a draw is larger than a physical batch"
    plain = plain_loop(trainer, watched.draws, noise_multiplier=1.0, lr=0.5)
    assert_same(weights(trainer.model), weights(plain))
    padded = private_trainer(tmp_path, settings=optimizer, pad_batches=True)
    padded.train()
    assert_same(weights(padded.model), weights(plain))


def test_epsilon_is_that_of_the_steps_that_were_taken(tmp_path):
    trainer = private_trainer(tmp_path, settings={"max_steps": -1, "num_train_epochs": 2})
    trainer.train()
    steps_of_an_epoch = -(-SAMPLES // LOGICAL)
    assert trainer.state.global_step == 2 * steps_of_an_epoch
    assert trainer.privacy_engine.accountant.history == [(1.0, 1 / steps_of_an_epoch, 2 * steps_of_an_epoch)]
    assert logged(trainer, "epsilon")[-1] == trainer.get_epsilon()
    assert logged(trainer, "epsilon") == sorted(logged(trainer, "epsilon"))


def test_the_log_tells_norms_of_samples_and_the_share_that_was_clipped(tmp_path):
    trainer = private_trainer(tmp_path, settings={"max_grad_norm": 1e-3})
    trainer.train()
    assert all(norm > 1e-3 for norm in logged(trainer, "grad_norm"))
    assert logged(trainer, "clipped_samples") == [1.0] * 4


def test_a_target_is_reached_and_not_passed(tmp_path):
    trainer = private_trainer(tmp_path, target_epsilon=2.0)
    trainer.train()
    assert trainer.state.global_step == 4
    assert 1.95 < trainer.get_epsilon() <= 2.0
    with pytest.raises(UserError, match="target_epsilon=2 is spent"):
        trainer.train()


def test_training_stops_when_the_target_is_reached(tmp_path):
    """The noise was chosen for four steps; the resumed run asks for forty."""
    private_trainer(tmp_path, target_epsilon=2.0, settings={"save_strategy": "steps", "save_steps": 2}).train()
    longer = private_trainer(tmp_path, target_epsilon=2.5, settings={"max_steps": 40})
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert 4 < longer.state.global_step < 40
    assert 2.2 < longer.get_epsilon() <= 2.5


@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, at):
    """Three draws make an epoch: once in the middle of one, once at its end."""
    whole = private_trainer(tmp_path / "whole", target_epsilon=2.0)
    whole.train()
    first = private_trainer(tmp_path / "cut", target_epsilon=2.0, settings={"save_strategy": "steps", "save_steps": at})
    first.train()
    resumed = private_trainer(tmp_path / "cut", target_epsilon=2.0)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{at}"))
    assert resumed.state.global_step == 4
    assert_same(weights(resumed.model), weights(whole.model), tolerance=0)
    assert resumed.get_epsilon() == whole.get_epsilon()


def test_draws_are_unpredictable_unless_a_seed_is_given_and_kept_in_the_checkpoint(tmp_path):
    saving = {"data_seed": None, "save_strategy": "steps", "save_steps": 2}
    seeds = []
    for run in ("one", "two"):
        private_trainer(tmp_path / run, settings=saving).train()
        seeds.append(json.loads((tmp_path / run / "checkpoint-2" / "privacy.json").read_text())["draw_seed"])
    assert seeds[0] != seeds[1]
    assert (tmp_path / "one" / "checkpoint-2" / "optimizer.pt").exists()


def test_a_checkpoint_without_the_spent_privacy_is_refused(tmp_path):
    private_trainer(tmp_path, settings={"save_strategy": "steps", "save_steps": 2}).train()
    (tmp_path / "checkpoint-2" / "privacy.json").unlink()
    with pytest.raises(UserError, match="privacy that its run has spent is not known"):
        private_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_an_empty_draw_is_a_step_of_noise(tmp_path):
    trainer = private_trainer(
        tmp_path, settings={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 12}
    )
    watched = Watched(trainer)
    trainer.train()
    assert [] in [draw[0] for draw in watched.draws], "the seed no longer gives an empty draw: choose another"
    assert sum(steps for *_, steps in trainer.privacy_engine.accountant.history) == 12


def test_two_trainings_of_one_trainer_add_up(tmp_path):
    trainer = private_trainer(tmp_path)
    watched = Watched(trainer)
    trainer.train()
    first = trainer.get_epsilon()
    trainer.train()
    assert len({str(draw) for draw in watched.draws}) == 8, "draws of the two are independent"
    assert trainer.privacy_engine.accountant.history[0][2] == 8
    assert trainer.get_epsilon() > first


def test_batches_of_another_loader_are_refused(tmp_path):
    class Other(type(private_trainer(tmp_path))):
        def _prepare_for_training(self, *args):
            model, _ = super()._prepare_for_training(*args)
            return model, DataLoader(Counting(), batch_size=4, collate_fn=collate)

    with pytest.raises(UserError, match="did not come from the private loader"):
        private_trainer(tmp_path, kind=Other).train()


def ordinary_trainer(folder, **settings):
    """What people write: make_private, and then the Trainer as it is."""
    model, engine = small_llama(), PrivacyEngine()
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(Counting(), batch_size=8, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    once = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0, **settings}
    args = arguments(folder, **once)
    trainer = Trainer(
        model=model, args=args, train_dataset=Counting(), data_collator=collate, optimizers=(optimizer, None)
    )
    return trainer, engine


def test_an_ordinary_trainer_is_told_apart_and_its_checkpoints_keep_epsilon(tmp_path):
    trainer, engine = ordinary_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    with pytest.warns(UserWarning, match="4 of 4 private steps were taken on batches that did not come from the"):
        spent = engine.get_epsilon(1e-3)
    trainer, engine = ordinary_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.warns(UserWarning, match="did not come from the private loader"):
        assert engine.get_epsilon(1e-3) == spent


def test_training_again_after_an_error_inside_a_draw_forgets_its_sums(tmp_path):
    trainer = private_trainer(tmp_path, noise_multiplier=0.0)
    backward, calls = trainer.accelerator.backward, []

    def fail_once(loss):
        calls.append(loss)
        if len(calls) == 2:
            raise MemoryError
        backward(loss)

    trainer.accelerator.backward = fail_once
    with pytest.raises(MemoryError):
        trainer.train()
    with pytest.warns(UserWarning, match="a part of a draw was trained on and the rest left out"):
        trainer.train()

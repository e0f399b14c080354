"""Lightning: the steps of a plain private loop, and checkpoints that keep ε."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from tests.unit.flash.private_training import make_loader, make_model, sgd
from tests.unit.two_ranks import fork_ranks

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as lightning

from dpscope.lightning import PrivateTraining
from tests.unit import lightning_rank
from tests.unit.lightning_fit import Classifier, loader, private, trainer


def test_steps_are_those_of_a_plain_private_loop(tmp_path):
    module, callback = Classifier(), private()
    trainer(tmp_path, callbacks=[callback]).fit(module, loader())
    plain = make_model()
    optimizer = sgd(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    plain, own, batches = PrivacyEngine().make_private(
        module=plain,
        optimizer=optimizer,
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        noise_generator=torch.Generator().manual_seed(1),
    )
    for _ in range(2):
        for x, y in batches:
            own.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            own.step()
        scheduler.step()
    for ours, theirs in zip(module.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert callback.privacy_engine.accountant.history == [(1.0, 0.25, 8)]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    one = private()
    trainer(tmp_path, callbacks=[one]).fit(module := Classifier(), loader())
    fork_ranks(lightning_rank.main, tmp_path)
    two = torch.load(tmp_path / "two.pt")
    for rank in two["weights"]:
        for ours, theirs in zip(rank, module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert two["epsilon"] == pytest.approx(one.get_epsilon(), rel=1e-9)
    assert two["resumed"] == [(1.0, 0.25, 12)]


def test_a_checkpoint_keeps_the_privacy_that_was_spent(tmp_path):
    first = private()
    fit = trainer(tmp_path, callbacks=[first], max_epochs=1)
    fit.fit(Classifier(), loader())
    fit.save_checkpoint(tmp_path / "one.ckpt")
    second = private(seed=2)
    trainer(tmp_path, callbacks=[second], max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert second.privacy_engine.accountant.history == [(1.0, 0.25, 8)]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    options = {"target_epsilon": 3.0, "pad_batches": 4}  # physical batches of a quarter of the logical one
    whole = private(**options)
    trainer(tmp_path, callbacks=[whole], max_epochs=3).fit(uninterrupted := Classifier(), loader(), loader())

    class Stop(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "stopped.ckpt")
            trainer.should_stop = True

    trainer(tmp_path, callbacks=[private(**options), Stop()], max_epochs=3).fit(Classifier(), loader(), loader())
    again = private(seed=2, **options)
    resumed = Classifier()
    fit = trainer(tmp_path, callbacks=[again], max_epochs=3)
    fit.fit(resumed, loader(seed=4), loader(), ckpt_path=tmp_path / "stopped.ckpt")
    assert again.get_epsilon() == whole.get_epsilon()
    for ours, theirs in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_target_chooses_the_noise_for_all_epochs(tmp_path):
    callback = private(target_epsilon=3.0)
    trainer(tmp_path, callbacks=[callback]).fit(Classifier(), loader())
    assert 2.9 < callback.get_epsilon() <= 3.0


def test_a_run_resumed_for_longer_ends_at_the_target(tmp_path):
    first = trainer(tmp_path, callbacks=[private(target_epsilon=3.0)], max_epochs=1)
    first.fit(Classifier(), loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    spent = private(target_epsilon=3.0)
    with pytest.raises(UserError, match="target_epsilon=3 is spent"):
        trainer(tmp_path, callbacks=[spent], max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "one.ckpt")
    more = private(target_epsilon=3.5)
    trainer(tmp_path, callbacks=[more], max_epochs=9).fit(Classifier(), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert 3.0 < more.get_epsilon() <= 3.5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val clips the sum"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches adds up"),
        ({"overfit_batches": 2}, "overfit_batches trains on the same batches"),
    ],
)
def test_what_lightning_would_do_behind_the_back_is_refused(tmp_path, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        trainer(tmp_path, callbacks=[private()], **settings).fit(Classifier(), make_loader())


def test_two_optimizers_are_refused(tmp_path):
    class Two(Classifier):
        def __init__(self):
            super().__init__(optimizers=2)
            self.automatic_optimization = False

    with pytest.raises(UserError, match="manual optimization"):
        trainer(tmp_path, callbacks=[private()]).fit(Two(), make_loader())


def test_one_of_noise_and_target_is_needed():
    with pytest.raises(UserError, match="one of target_epsilon and noise_multiplier"):
        PrivateTraining(max_grad_norm=1.0, target_delta=1e-5)

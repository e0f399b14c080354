"""What a micro-batch is: which forwards, losses and backward passes are about the same samples."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import (
    REDUCTIONS,
    assert_agrees,
    assert_exact,
    private_step,
    reference,
)
from tests.unit.flash.flash_models import sine_losses
from tests.unit.flash.small_models import assert_close, gradients, mlp


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("closing", ["by the next forward", "by finish"])
def test_micro_batches_add_up_to_the_whole_batch(reduction, closing):
    model, batch = mlp(), {"x": torch.randn(7, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c, loss_reduction=reduction) as engine:
        for part in batch["x"].split([3, 1, 3]):
            losses = sine_losses(model, {"x": part})
            (losses.mean() if reduction == "mean" else losses.sum()).backward()
            if closing == "by finish":
                engine.finish()
        engine.finish()
        assert engine.samples == 7
    assert_close(gradients(model), truth.clipped_sums)


def test_several_losses_of_one_forward_add_before_the_norm():
    model, x = mlp(), torch.randn(4, 5)
    both = {"x": x}
    truth, c = reference(model, both, lambda m, b: m(b["x"]).sin().sum(1) + m(b["x"]).square().sum(1))
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum") as engine:
        output = model(x)
        output.sin().sum().backward(retain_graph=True)
        output.square().sum().backward()
        engine.finish()
    assert_close(gradients(model), truth.clipped_sums)
    torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-6, atol=0)


def test_several_forwards_before_backward_are_about_the_same_samples():
    model, batch = mlp(), {"x": torch.randn(4, 5), "z": torch.randn(4, 5)}
    losses = lambda m, b: (m(b["x"]) * m(b["z"])).sum(1)  # noqa: E731
    assert_exact(model, batch, losses)


def test_forwards_of_different_sizes_before_one_backward_are_refused():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        (model(torch.randn(4, 5)).sum() + model(torch.randn(3, 5)).sum()).backward()
        with pytest.raises(UserError, match=r"\[3, 4\] samples"):
            engine.finish()


@pytest.mark.parametrize("fault", ["mismatched sizes", "changed in place"])
def test_the_micro_batch_after_a_refused_one_is_clipped_and_summed_as_ever(fault):
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        x = torch.randn(4, 5)
        loss = sine_losses(model, {"x": x}).mean()
        if fault == "mismatched sizes":
            loss = loss + sine_losses(model, {"x": x[:3]}).mean()
        loss.backward()
        x.add_(1)
        with pytest.raises(UserError):
            engine.finish()
        private_step(engine, batch, sine_losses)
    assert_agrees(model, batch, sine_losses, engine, truth, c)


def test_backward_through_a_forward_that_was_already_summed_is_refused():
    model = mlp()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        loss = model(torch.randn(4, 5)).sin().sum()
        loss.backward(retain_graph=True)
        engine.finish()
        with pytest.raises(UserError, match="already clipped and summed"):
            loss.backward()


def test_a_forward_without_gradients_between_backward_and_finish_changes_nothing():
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        sine_losses(model, batch).mean().backward()
        with torch.no_grad():
            model(torch.randn(9, 5))
        assert engine.pending
        engine.finish()
    assert_close(gradients(model), truth.clipped_sums)


def test_parts_of_the_model_may_be_called_without_the_root_where_the_caller_says_how_many_samples_there_are():
    model = nn.ModuleDict({"encoder": mlp(), "head": nn.Linear(3, 2)})
    batch = {"x": torch.randn(4, 5)}
    losses = lambda m, b: m["head"](m["encoder"](b["x"])).sin().sum(1)  # noqa: E731
    truth, c = reference(model, batch, losses)
    with (
        pytest.raises(UserError, match=r"encoder\.0 was called outside .*batch_size_of"),
        FlashEngine(model, max_grad_norm=c),
    ):
        losses(model, batch)
    first = lambda args, kwargs: len(args[0])  # noqa: E731
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum", batch_size_of=first) as engine:
        for part in batch["x"].split([1, 3]):
            losses(model, {"x": part}).sum().backward()
        engine.finish()
    assert_close(gradients(model), truth.clipped_sums)


def test_zero_grad_throws_away_what_was_not_summed():
    model, batch = mlp(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    with FlashEngine(model, max_grad_norm=c) as engine:
        sine_losses(model, {"x": torch.randn(6, 5)}).mean().backward()
        model.zero_grad()
        private_step(engine, batch, sine_losses)
        assert engine.samples == 4
    assert_close(gradients(model), truth.clipped_sums)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_of_both_kinds(reentrant, autocast):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last, self.on = nn.Linear(5, 5), mlp(), nn.Linear(3, 2), True

        def forward(self, x):
            h = self.first(x)
            h = checkpoint(self.middle, h, use_reentrant=reentrant) if self.on else self.middle(h)
            return self.last(h)

    model, batch = Checkpointed(), {"x": torch.randn(4, 6, 5)}
    found = {}
    for on in (True, False):
        model.on = on
        model.zero_grad()
        with FlashEngine(model, max_grad_norm=0.5) as engine, torch.autocast("cpu", enabled=autocast):
            private_step(engine, batch, sine_losses)
        found[on] = (gradients(model), engine.norms)
    assert_close(found[True][0], found[False][0], rtol=1e-6)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-6, atol=0)
    if not autocast:
        model.on = False
        assert_exact(model, batch, sine_losses)


class Scale(nn.Module):
    """A module with a parameter of its own: it runs sample by sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("unit", [nn.Linear(5, 5), Scale(5)])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_zero_grad_may_come_between_forward_and_backward(unit, reentrant):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unit, self.reentrant = nn.Linear(5, 5), unit, None

        def forward(self, x):
            h = self.first(x)
            return self.unit(h) if self.reentrant is None else checkpoint(self.unit, h, use_reentrant=self.reentrant)

    model, batch = Model(), {"x": torch.randn(4, 5)}
    truth, c = reference(model, batch, sine_losses)
    model.reentrant = reentrant
    with FlashEngine(model, max_grad_norm=c) as engine:
        for _ in range(2):
            loss = sine_losses(model, batch).mean()
            model.zero_grad()
            loss.backward()
            engine.finish()
    assert_close(gradients(model), truth.clipped_sums)


def test_a_checkpointed_model_run_twice_stays_one_micro_batch():
    model = mlp()
    batch = {"x": torch.randn(4, 5), "z": torch.randn(4, 5)}
    truth, c = reference(model, batch, lambda m, b: (m(b["x"]) * m(b["z"])).sum(1))
    with FlashEngine(model, max_grad_norm=c, loss_reduction="sum") as engine:
        first, second = (checkpoint(model, batch[key], use_reentrant=False) for key in "xz")
        (first * second).sum().backward()
        engine.finish()
        assert engine.samples == 4
    assert_close(gradients(model), truth.clipped_sums)

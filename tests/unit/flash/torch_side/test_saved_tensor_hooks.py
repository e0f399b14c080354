"""The hooks in force are known on every torch: where it does not tell, from who entered them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine
from dpscope.flash.torch_side import autograd_graph
from dpscope.flash.torch_side.autograd_graph import Entered, current_hooks, note_entries, without_hooks
from tests.unit.flash.agreement import assert_agrees, private_step, reference
from tests.unit.flash.sample_rows.verified_models import losses, rows


@pytest.fixture(params=[False, True], ids=["as it is", "of a torch that does not tell"])
def _torch(request, monkeypatch):
    if not request.param:
        return
    entered = Entered()
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(saved_tensors_hooks, name, getattr(saved_tensors_hooks, name))
    note_entries(saved_tensors_hooks, entered)
    monkeypatch.setattr(autograd_graph, "_top", None)
    monkeypatch.setattr(autograd_graph, "_entered", entered)


def identity(x):
    return x


@pytest.mark.usefixtures("_torch")
def test_the_innermost_hooks_are_told_until_they_are_left():
    def other(x):
        return x

    assert current_hooks() is None
    with saved_tensors_hooks(identity, identity):
        with pytest.raises(KeyError), saved_tensors_hooks(other, identity):
            assert current_hooks() == (other, identity)
            raise KeyError
        assert current_hooks() == (identity, identity)
    assert current_hooks() is None


@pytest.mark.usefixtures("_torch")
def test_hooks_are_taken_away_and_come_back_in_order():
    def other(x):
        return x

    with saved_tensors_hooks(identity, identity), saved_tensors_hooks(other, identity):
        with pytest.raises(KeyError), without_hooks():
            assert current_hooks() is None
            with torch.autograd.graph.disable_saved_tensors_hooks("none are there"):
                raise KeyError
        assert current_hooks() == (other, identity)
    assert current_hooks() is None


class TakesGradients(nn.Module):
    """Gradients are enabled in its forward, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    @torch.enable_grad()
    def forward(self, x):
        return self.last(self.first(x).tanh())


@pytest.mark.usefixtures("_torch")
def test_hooks_of_the_user_see_nothing_of_verification():
    model, x, packed = TakesGradients(), torch.randn(4, 6), []
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        seen = []
        for _ in range(3):
            with saved_tensors_hooks(lambda x: packed.append(1) or x, identity):
                model(x).square().sum().backward()
            engine.finish()
            seen.append(len(packed))
            packed.clear()
    assert engine.verification.schedule.looks == [2]
    assert len(set(seen)) == 1, seen


class Owner(nn.Module):
    """Uses its parameter, in a checkpoint of its own if told so."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.rand(6)), inside

    def forward(self, x):
        return checkpoint(self.scaled, x, use_reentrant=False) if self.inside else self.scaled(x)

    def scaled(self, x):
        return torch.tanh(x * torch.tanh(self.scale))


class Blocks(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.owner = nn.Linear(6, 6), Owner(inside)

    def forward(self, x):
        return checkpoint(self.owner, self.first(x), use_reentrant=False)


@pytest.mark.usefixtures("_torch")
def test_a_parameter_that_a_checkpoint_around_its_module_uses_is_followed():
    torch.manual_seed(0)
    model, x = Blocks(inside=False), torch.randn(3, 6)
    per_sample = [torch.autograd.grad(model(x[b : b + 1]).square().sum(), model.owner.scale)[0] for b in range(3)]
    with FlashEngine(model, max_grad_norm=1e9, loss_reduction="sum") as engine:
        model(x).square().sum().backward()
        engine.finish()
        assert "opaque" not in {row.kind for row in engine.explain()}
    torch.testing.assert_close(model.owner.scale.grad, torch.stack(per_sample).sum(0))


@pytest.mark.usefixtures("_torch")
def test_a_parameter_that_a_checkpoint_inside_a_checkpointed_module_uses_is_not_followed():
    """Its hooks would run it again for each use."""
    model = Blocks(inside=True)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(3, 6))
        assert "opaque" in {row.kind for row in engine.explain()}


class InOneDtype(nn.Module):
    """Has a checkpoint that fails in other dtypes than `dtype`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(6, 6), nn.Linear(6, 2), torch.float64

    def hidden(self, x):
        if x.dtype != self.dtype:
            raise TypeError(f"{self.dtype} is expected")
        return self.first(x).tanh()

    def forward(self, x):
        return self.last(checkpoint(self.hidden, x, use_reentrant=False))


class OwnGradient(nn.Module):
    """Takes a gradient itself, in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def hidden(self, x):
        (gradient,) = torch.autograd.grad(self.first(x).tanh().square().sum(), x, create_graph=True)
        return x + gradient

    def forward(self, x):
        return self.last(checkpoint(self.hidden, x.detach().requires_grad_(), use_reentrant=False))


@pytest.mark.parametrize("make", [InOneDtype, OwnGradient])
def test_a_checkpoint_that_fails_in_verification_leaves_no_hooks(make):
    model, batch = make(), rows(8)
    truth, c = reference(model, batch, losses)
    model.dtype = torch.float32
    with FlashEngine(model, max_grad_norm=c) as engine:
        private_step(engine, batch, losses)
        assert current_hooks() is None
    assert_agrees(model, batch, losses, engine, truth, c)

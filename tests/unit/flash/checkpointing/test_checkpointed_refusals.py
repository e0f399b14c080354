"""Checkpointed blocks that are refused, held, or left alone, and what a step leaves of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.checkpointed_models import (
    KINDS,
    OneBlock,
    assert_sums,
    clipped,
    decoder,
    how,
    step,
    truth_of,
)
from tests.unit.flash.flash_models import token_batch, token_losses


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return token_batch(4, 16)


@pytest.mark.parametrize("layer", ["mlp.0", "mlp.2", "norm1", "k"])
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_a_gradient_that_enters_a_block_beside_its_outputs_is_refused(layer, share, batch):
    """What runs again gets the gradients of the outputs alone: norms and sums would not belong together."""
    model = decoder()
    model.blocks[0].get_submodule(layer).register_forward_hook(
        lambda module, args, output: setattr(model, "hidden", output)
    )
    with FlashEngine(model, max_grad_norm=0.1, memory_budget="lean") as engine:
        losses = token_losses(model, batch)
        (losses + share * model.hidden.square().mean((1, 2))).mean().backward()
        with pytest.raises(UserError, match=r"blocks\.0 gave its layers other gradients"):
            engine.finish()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("change", ["weight", "mode", "batch"])
def test_what_changes_between_backward_and_the_step_is_refused(change):
    model, x = OneBlock(), torch.randn(3, 5, 6)
    with FlashEngine(model, max_grad_norm=0.1, memory_budget="lean") as engine:
        model(x).mean().backward()
        if change == "weight":
            torch.nn.init.normal_(model.last.weight)
        elif change == "mode":
            model.eval()
        else:
            x.zero_()
        with pytest.raises(UserError, match="between backward and the optimizer step"):
            engine.finish()


def test_blocks_that_cannot_be_run_again_are_held_and_explained(batch):
    class Nested(nn.Module):
        def __init__(self, block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    class Same(nn.Module):
        def __init__(self, block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            self.block(x)
            return x

    model = decoder(layers=3)
    model.blocks[0], model.blocks[2] = Nested(model.blocks[0]), Same(model.blocks[2])
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        step(engine, batch)
    assert_sums(model, clipped(gradients, c))
    rows = {row.block: row for row in engine.explain().blocks}
    assert [row.how for row in rows.values()] == ["held", "recomputed", "held"]
    assert "a checkpoint of its own" in rows["blocks.0.block"].why
    assert "gives back what it is given" in rows["number 2"].why


def test_a_single_sample_is_held(batch):
    model = decoder()
    gradients, c = truth_of(model, {key: value[:1] for key, value in batch.items()})
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        step(engine, {key: value[:1] for key, value in batch.items()})
    assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["held"] * 2


def test_without_a_budget_blocks_are_left_alone(batch):
    with FlashEngine(decoder(), max_grad_norm=1.0) as engine:
        step(engine, batch)
    assert engine.explain().blocks == []


def test_dropped_micro_batches_leave_nothing(batch):
    model = decoder()
    gradients, c = truth_of(model, batch)
    other = token_batch(4, 16)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        token_losses(model, other).mean().backward()
        model.zero_grad()
        step(engine, batch)
        assert engine.samples == 4
    assert_sums(model, clipped(gradients, c))


@KINDS
def test_gradients_of_the_input_alone_leave_nothing(reentrant):
    model, x = OneBlock(), torch.randn(3, 5, 6, requires_grad=True)
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        loss = model(x).mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        assert not engine.pending
        assert how(engine) == []
        loss.backward()
        assert how(engine) == ["recomputed"]
        engine.finish()
        assert engine.samples == 3


@KINDS
def test_inputs_that_require_a_gradient_get_theirs_once(reentrant):
    model, x = OneBlock(reentrant), torch.randn(3, 5, 6, requires_grad=True)
    model(x).mean().backward()
    expected, x.grad = x.grad, None
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        model(x).mean().backward()
        engine.finish()
    torch.testing.assert_close(x.grad, expected)


def test_where_torch_does_not_tell_of_its_checkpoints_they_are_held_and_that_is_said(batch, monkeypatch):
    monkeypatch.setattr("dpscope.flash.checkpointing.checkpointed_blocks.can_be_watched", lambda: False)
    model = decoder()
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        step(engine, batch)
    assert_sums(model, clipped(gradients, c))
    assert "does not tell of its checkpoints" in engine.explain().blocks[0].why


class Gate(nn.Module):
    """x, times something that is not the same in the next call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.open = kind, 0, 1.0
        self.register_buffer("count", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        self.calls += 1
        self.count = self.count + 1
        if self.kind == "generator":
            return x * torch.rand((1,), generator=self.generator)
        return x * {"attribute": self.calls, "buffer": self.count, "set by the user": self.open}[self.kind]


@pytest.mark.parametrize("before", [True, False], ids=["before the layer", "after it"])
@pytest.mark.parametrize("kind", ["attribute", "buffer", "set by the user", "generator"])
@KINDS
def test_a_block_whose_layer_would_read_something_else_is_refused(reentrant, kind, before):
    """Norms are of what it read in backward. Before a lone layer the gate changes its input, and no gradient."""
    model, x = OneBlock(reentrant), torch.randn(4, 3, 6, requires_grad=True)
    gate, layer = Gate(kind), nn.Linear(6, 6, bias=False)
    model.block = nn.Sequential(gate, layer) if before else nn.Sequential(layer, gate)
    with (
        FlashEngine(model, max_grad_norm=1e-3, memory_budget=1) as engine,
        pytest.raises(UserError, match=r"other gradients or inputs|rows of other samples"),
    ):
        model(x).square().sum((1, 2)).mean().backward()
        gate.open = 3.0
        engine.finish()

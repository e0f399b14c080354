"""How many checkpointed blocks are held, told by an allocator that plays back what is live."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine
from dpscope.flash.explanation import BlockRow
from dpscope.flash.memory_budget import Allocated
from dpscope.flash.recomputation import _tensors, bytes_of
from tests.unit.flash.checkpointed_models import assert_sums, clipped, how, some_clipped, true_gradients

BLOCKS = 4


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(BLOCKS))
        self.on = True

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.on else block(x)
        return x


def losses(model, batch):
    return model(batch).sin().sum((1, 2))


BATCH = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
BOUNDARY = 2 * BATCH.nbytes
BIASES = 3 * (32 + 8) * 4
HELD = BATCH.nbytes * (2 + 2 * 4) + BIASES  # x and g of both layers
SUMS = 4 * (8 * 32 + 32 + 32 * 8 + 8)
LIVE = 10**6  # bytes in use all the time


def after_two_steps(budget) -> FlashEngine:
    """The second knows what blocks take."""
    model = Chain()
    model.on = False
    gradients = true_gradients(model, BATCH, losses)
    model.on, c = True, some_clipped(gradients)
    with FlashEngine(model, max_grad_norm=c, memory_budget=budget) as engine:

        def allocated():
            held = sum(bytes_of(iter(_tensors(part))) for _, part in engine.contributions())
            bytes_now = LIVE + held + sum(each.boundary_bytes for each in engine.blocks._passes)
            return Allocated(bytes_now, bytes_now)

        engine.path_rules.budget._read = allocated
        for _ in range(2):
            model.zero_grad()
            losses(model, BATCH).mean().backward()
            engine.finish()
    assert_sums(model, clipped(gradients, c))
    return engine


@pytest.mark.parametrize("held", range(BLOCKS + 1))
def test_as_many_blocks_are_held_as_fit_a_number_of_bytes(held):
    """Backward reaches the last first. Each that is not held leaves its boundary, and a sum at the end."""
    recomputed = BLOCKS - held
    engine = after_two_steps(LIVE + held * HELD + recomputed * (BOUNDARY + SUMS))
    assert how(engine) == ["recomputed"] * recomputed + ["held"] * held


def test_lean_recomputes_all_of_them():
    engine = after_two_steps("lean")
    assert how(engine) == ["recomputed"] * BLOCKS
    assert engine.explain().blocks[0] == BlockRow("blocks.0", "recomputed", f"{BOUNDARY} bytes are held, not {HELD}")


def test_a_budget_below_the_leanest_step_is_told():
    engine = after_two_steps(1000)
    assert how(engine) == ["recomputed"] * BLOCKS
    assert "the leanest step takes about 10" in engine.explain().blocks[0].why
    assert "the memory budget is 1000" in str(engine.explain())


def test_a_block_whose_layers_hold_less_than_its_boundary_is_held():
    class OneAdapter(Chain):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.requires_grad_(False)
                block[0].bias.requires_grad_(True)

    model = OneAdapter()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        for expected in ("recomputed", "held"):
            model.zero_grad()
            losses(model, BATCH).mean().backward()
            engine.finish()
            assert how(engine) == [expected] * BLOCKS


def test_samples_of_another_shape_are_measured_anew_and_another_number_of_them_is_not():
    """Long sequences make a block hold its layers' gradients, which is little; short ones do not."""
    model = Chain()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        for batch, expected in [
            ((3, 64), "recomputed"),
            ((5, 64), "held"),
            ((5, 4), "recomputed"),
            ((3, 4), "recomputed"),
        ]:
            model.zero_grad()
            losses(model, torch.randn(*batch, 8)).mean().backward()
            engine.finish()
            assert how(engine) == [expected] * BLOCKS
    assert engine.explain().blocks[0].why == f"{BOUNDARY} bytes are held, not {HELD}"


def test_blocks_without_trained_layers_keep_nothing():
    model = Chain()
    model.blocks[:2].requires_grad_(False)
    model.blocks[3].requires_grad_(False)
    x = BATCH.clone().requires_grad_()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        for passes in (4, 1):
            model.zero_grad()
            losses(model, x).mean().backward()
            assert len(engine.blocks._passes) == passes
            engine.finish()
    assert how(engine) == ["held", "held", "recomputed", "held"]

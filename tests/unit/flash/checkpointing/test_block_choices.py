"""How many checkpointed blocks are held, told by the bytes of all storages that live."""

from __future__ import annotations

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine
from dpscope.flash.checkpointing.block_choices import BlockRow
from tests.unit.flash.checkpointed_models import CheckpointedDecoder, assert_sums, clipped, how, true_gradients
from tests.unit.flash.flash_models import token_batch, token_losses
from tests.unit.flash.live_bytes import LiveBytes

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


class Decoder(CheckpointedDecoder):
    """Wide enough that what counts is x and g of its layers, sums, and the head's logits."""

    def __init__(self, vocabulary: int = 17) -> None:
        torch.manual_seed(0)
        super().__init__(vocabulary=vocabulary, width=32, layers=BLOCKS)


TOKENS = token_batch(8, 32)


def ordinary_peak(model: nn.Module) -> int:
    """Of a step of checkpointed training, gradients set to None before it."""
    live = LiveBytes(*model.parameters(), *TOKENS.values())
    with live:
        token_losses(model, TOKENS).mean().backward()
    model.zero_grad()
    return live.peak


def trained(model: nn.Module, budget: float | str) -> tuple[FlashEngine, int]:
    """The engine after two steps, and the peak of the second, which knows what blocks take."""
    live = LiveBytes(*model.parameters(), *TOKENS.values())
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget) as engine, MonkeyPatch.context() as patch:
        token_losses(model, TOKENS)  # verification, which nobody counts
        live.count_results_of_kernels(patch)
        patch.setattr(engine.path_rules.budget, "allocated", live)
        with live:
            for _ in range(2):
                model.zero_grad()
                live.peak = live.current
                token_losses(model, TOKENS).mean().backward()
                engine.finish()
    return engine, live.peak


@pytest.fixture(scope="module")
def truth():
    model = Decoder()
    model.kind = None
    gradients = true_gradients(model, TOKENS, token_losses)
    return clipped(gradients, 0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_as_many_blocks_are_held_as_fit_a_number_of_bytes_and_the_peak_stays_below_it(reentrant, truth):
    """Told by the storages that live: from the leanest step to one that holds every block."""
    counts = []
    model = Decoder()
    model.kind = reentrant
    _, leanest = trained(model, 1.0)
    _, most = trained(model, 1e9)
    for share in (0.0, 0.5, 1.15):
        limit = leanest + share * (most - leanest)
        engine, peak = trained(model, limit)
        assert peak <= 1.02 * limit
        found = how(engine)
        counts.append(found.count("held"))
        assert_sums(model, truth)
    assert counts[0] < counts[1] < counts[2] == BLOCKS
    assert "it fits the memory budget: about" in engine.explain().blocks[0].why


@pytest.mark.parametrize("vocabulary", [17, 1000])
def test_lean_holds_as_many_blocks_as_fit_the_peak_of_ordinary_training(vocabulary):
    """With many words it is at the logits; backward has freed them where blocks are held."""
    model = Decoder(vocabulary)
    peak = ordinary_peak(model)
    _, leanest = trained(model, 1.0)
    engine, lean = trained(model, "lean")
    assert lean <= max(1.02 * peak, leanest)
    if vocabulary == 1000:
        assert how(engine).count("held") >= 2
        assert "it fits the peak of ordinary training: about" in str(engine.explain())


def test_lean_recomputes_all_of_them_where_nobody_counts():
    model = Chain()
    with FlashEngine(model, max_grad_norm=0.1, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            losses(model, BATCH).mean().backward()
            engine.finish()
    assert how(engine) == ["recomputed"] * BLOCKS
    assert engine.explain().blocks[0] == BlockRow("blocks.0", "recomputed", f"{BOUNDARY} bytes are held, not {HELD}")


def test_a_budget_below_the_leanest_step_is_told():
    engine, _ = trained(Decoder(), 1000)
    assert how(engine) == ["recomputed"] * BLOCKS
    assert "the leanest step takes about " in engine.explain().blocks[0].why
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

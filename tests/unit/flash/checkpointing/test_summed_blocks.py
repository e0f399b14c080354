"""Blocks whose groups of the clipping rule lie inside them are summed when backward leaves them: no second pass."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.gradients import contributions, norms
from dpscope.flash.step import microbatch
from tests.unit.flash.agreement import one_loss
from tests.unit.flash.checkpointed_models import KINDS, OneBlock, how
from tests.unit.flash.private_training import make_private, sgd

INSIDE = {"block.*": 0.3, "*": 0.4}  # one group is the block's
ACROSS = {"*bias": 0.3, "*": 0.4}  # both have parameters of the last layer, too


def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).flatten(1).sin().sum(1)


def make(reentrant: bool = False) -> tuple[OneBlock, torch.Tensor]:
    return OneBlock(reentrant).double(), torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=reentrant)


def assert_exact(model: nn.Module, x: torch.Tensor, clipping: str, bounds: object, times: int = 1) -> None:
    alone = copy.deepcopy(model)
    alone.reentrant = False  # which needs no x that requires a gradient
    truth = run_oracle(alone, x.detach(), one_loss(losses), max_grad_norm=bounds, clipping=clipping).clipped_sums
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, times * truth[name], rtol=1e-9, atol=1e-12)


RULES = {
    "per_layer": ("per_layer", 0.5, "summed"),
    "inside": ("per_group", INSIDE, "summed"),
    "across": ("per_group", ACROSS, "recomputed"),
}


@KINDS
@pytest.mark.parametrize("case", RULES)
def test_a_block_runs_forward_twice_as_in_ordinary_training_and_its_sums_are_exact(case: str, reentrant: bool) -> None:
    clipping, bounds, expected = RULES[case]
    model, x = make(reentrant)
    runs = []
    model.block[1].register_forward_hook(lambda *_: runs.append(1))
    with FlashEngine(model, max_grad_norm=bounds, clipping=clipping, memory_budget="lean") as engine:
        engine.verification.schedule.pause()
        for _ in range(3):
            engine.zero_grad()
            runs.clear()
            losses(model, x).mean().backward()
            engine.finish()
        assert (how(engine), len(runs)) == ([expected], 2 if expected == "summed" else 3)
        assert_exact(model, x, clipping, bounds)


def test_after_backward_only_sums_are_left_of_the_block() -> None:
    model, x = make()
    with FlashEngine(model, clipping="per_layer", memory_budget="lean") as engine:
        for step in range(2):
            losses(model, x).mean().backward()
            assert not any(slot.name.startswith("block.0") for slot, _ in engine.contributions())
            assert engine.blocks is not None
            (done,) = engine.blocks._passes
            engine.blocks.flush()
            assert not done.gathered
            assert {p for batch in done.sums for p in batch.parameters} == set(model.block.parameters())
            assert (done.input is None, done.grads == []) == ((True, True) if step else (False, False))
            engine.finish()


def test_all_layers_of_a_block_are_normed_and_summed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for module, name in (
        (microbatch, "many_bias_sums"),
        (norms, "kept_norms_apart"),
        (norms, "gram_norms_apart"),
        (microbatch, "kept_sums"),
        (contributions, "scaled_sums"),
    ):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=plain, **k: calls.update([n]) or f(*a, **k))
    model, x = make()
    with FlashEngine(model, clipping="per_layer", path="gram", memory_budget="lean") as engine:
        loss = losses(model, x).mean()
        calls.clear()  # of the self-test
        loss.backward()
        assert engine.blocks is not None
        engine.blocks.flush()
        assert set(calls.values()) == {1}
        assert len(calls) == 5


def test_a_block_that_is_not_summed_after_all_holds_sums_and_not_what_they_are_made_of() -> None:
    model, x = OneBlock(), torch.randn(4, 64, 6)
    with FlashEngine(model, max_grad_norm=ACROSS, clipping="per_group", memory_budget="lean") as engine:
        losses(model, x).mean().backward()
        assert engine.blocks is not None
        engine.blocks.flush()
        held = [part for slot, part in engine.contributions() if slot.name.startswith("block")]
        assert held
        assert all(part.summed_later is None for part in held)


def test_micro_batches_add_up_and_a_dropped_one_leaves_nothing() -> None:
    model, x = make()
    with FlashEngine(model, clipping="per_layer", memory_budget="lean", loss_reduction="sum") as engine:
        for _ in range(2):
            losses(model, x).sum().backward()
            engine.zero_grad()
            for _ in range(2):
                losses(model, x).sum().backward()
            engine.finish()
            assert_exact(model, x, "per_layer", 1.0, times=2)
            engine.zero_grad()


def test_noise_is_that_of_the_bound_at_which_a_block_was_summed() -> None:
    model = OneBlock()
    x, y = torch.randn(8, 3, 6), torch.zeros(8)
    _, optimizer, _ = make_private(model, sgd(model), clipping="per_layer", max_grad_norm=2.0, memory_budget="lean")
    (model(x).flatten(1).mean(1) - y).square().mean().backward()
    optimizer.engine.blocks.flush()  # as where backward reaches the next block
    optimizer.max_grad_norm = 0.5
    optimizer.engine.accumulate()
    assert optimizer.engine.state.largest_clip == pytest.approx(2.0)


class Shared(OneBlock):
    """The block's first layer may be used once more, outside of the block."""

    twice = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, x, use_reentrant=False)
        return self.last(y + self.block[0](x).sum(-1, keepdim=True) if self.twice else y)


def test_a_block_whose_layer_is_used_elsewhere_is_held_and_exact() -> None:
    model, x = Shared().double(), torch.randn(4, 3, 6).double()
    with FlashEngine(model, max_grad_norm=0.5, clipping="per_layer", memory_budget="lean") as engine:
        for _ in range(2):
            engine.zero_grad()
            losses(model, x).mean().backward()
            engine.finish()
            assert_exact(model, x, "per_layer", 0.5)
        assert how(engine) == ["held"]


def test_a_use_elsewhere_that_begins_after_the_sums_are_made_is_refused() -> None:
    model, x = Shared(), torch.randn(4, 3, 6)
    model.twice = False
    with FlashEngine(model, clipping="per_layer", memory_budget="lean") as engine:
        losses(model, x).mean().backward()
        engine.finish()
        engine.zero_grad()
        model.twice = True
        losses(model, x).mean().backward()
        with pytest.raises(UserError, match=r"block\.0\.\w+ is used elsewhere, too, after the sums"):
            engine.finish()


class Scaled(torch.autograd.Function):
    """Identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, y, scale):
        ctx.scale = scale
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


class Bursting(OneBlock):
    """The block's gradient is infinite for samples that begin with a negative number, that of the last layer is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, x, use_reentrant=False)
        return self.last(Scaled.apply(y, torch.where(x[:, :1, :1] < 0, torch.inf, 1.0)))


@pytest.mark.parametrize("budget", [None, "lean"])
def test_a_sample_has_no_share_in_groups_where_its_gradient_is_not_finite(budget: str | None) -> None:
    model, x = Bursting().double(), torch.randn(4, 3, 6).double().abs()
    x[1] *= -1
    with FlashEngine(model, max_grad_norm=0.5, clipping="per_layer", memory_budget=budget) as engine:
        for _ in range(2):
            engine.zero_grad()
            losses(model, x).mean().backward()
            engine.finish()
            assert_exact(model, x, "per_layer", 0.5)
            assert (engine.factors == 0).sum(0).tolist() == [1] * 4 + [0] * 2
        assert engine.nonfinite_samples.item() == 2

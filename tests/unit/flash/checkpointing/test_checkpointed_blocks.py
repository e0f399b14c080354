"""Checkpointed blocks under a memory budget: run again at the step, and exact."""

from __future__ import annotations

import functools
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import DPFlashOptimizer, FlashEngine, PrivacyEngine
from dpscope.flash.taps.recorder import Recorder
from tests.unit.flash.checkpointed_models import (
    KINDS,
    CheckpointedDecoder,
    OneBlock,
    assert_sums,
    clipped,
    decoder,
    how,
    norms_of,
    some_clipped,
    step,
    true_gradients,
    truth_of,
)
from tests.unit.flash.flash_models import token_batch, token_losses


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return token_batch(4, 16)


@KINDS
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("preserve", [True, False])
def test_recomputed_blocks_give_the_true_sums(reentrant, dropout, preserve, batch):
    if dropout and not preserve:
        pytest.skip("backward then is of other masks than forward, in ordinary training as well")
    model = decoder(dropout=dropout, kind=reentrant)
    model.options = {"preserve_rng_state": preserve}
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(3):
            model.zero_grad()
            step(engine, batch)
            assert how(engine) == ["recomputed"] * 2
            torch.testing.assert_close(engine.norms.double(), norms_of(gradients), rtol=1e-5, atol=0)
            assert_sums(model, clipped(gradients, c))


@KINDS
def test_where_random_states_are_not_preserved_a_recomputed_block_is_as_a_held_one(reentrant, batch):
    found = []
    for budget in (None, "lean"):
        model = decoder(dropout=0.3, kind=reentrant)
        model.options = {"preserve_rng_state": False}
        with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget) as engine:
            step(engine, batch)
        found.append({name: p.grad.double() for name, p in model.named_parameters()})
    assert_sums(model, found[0])


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["random", "numpy"])
def test_a_block_that_draws_numbers_outside_of_torch_draws_the_same_again(draw, batch):
    """Torch does not put these states back: backward is of other numbers than forward, held or not."""

    class Drawing(CheckpointedDecoder):
        def run_block(self, block, x):
            return super().run_block(block, x) * (0.5 + draw())

    found = []
    for budget in (None, "lean"):
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        model = Drawing(kind=True)
        with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget) as engine:
            for _ in range(2):
                model.zero_grad()
                step(engine, batch)
        found.append({name: p.grad.double() for name, p in model.named_parameters()})
    assert_sums(model, found[0])


@KINDS
def test_the_random_state_after_a_step_is_as_if_blocks_had_been_held(reentrant, batch):
    after = []
    for budget in (None, "lean"):
        with FlashEngine(decoder(dropout=0.3, kind=reentrant), max_grad_norm=0.1, memory_budget=budget) as engine:
            step(engine, batch)
            after.append(torch.get_rng_state())
    assert torch.equal(*after)


@KINDS
@pytest.mark.parametrize("path", ["gram", "keep"])
def test_under_autocast_and_on_the_same_path_recomputed_blocks_are_the_held_ones(reentrant, path, batch):
    found = []
    for budget in (None, "lean"):
        model = decoder(dropout=0.2, kind=reentrant)
        with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget, path=path) as engine:
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_losses(model, batch).mean()
            loss.backward()
            engine.finish()
        found.append([engine.norms, *(p.grad for p in model.parameters())])
    for held, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, held, rtol=1e-6, atol=1e-9)


@KINDS
def test_micro_batches_add_up(reentrant, batch):
    model = decoder(kind=reentrant)
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for part in parts:
            token_losses(model, part).mean().backward()
        engine.finish()
    assert_sums(model, clipped(gradients, c))


def test_several_backward_passes_through_one_forward_are_one_gradient(batch):
    """The norm is that of their sum: the blocks' gradients are put together before it is taken."""
    model = decoder()

    def both(model, batch):
        logits = model(batch["ids"])
        return logits.square().mean((1, 2)), logits.sin().sum((1, 2))

    gradients, c = truth_of(model, batch, lambda model, batch: sum(both(model, batch)))
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for expected in ("recomputed", "held"):
            model.zero_grad()
            first, second = both(model, batch)
            first.mean().backward(retain_graph=True)
            assert how(engine) == [expected] * 2
            second.mean().backward()
            engine.finish()
            assert_sums(model, clipped(gradients, c))
            assert how(engine) == ["held"] * 2
    assert "is used elsewhere" in engine.explain().blocks[0].why


@KINDS
def test_a_block_that_is_used_twice_is_normed_with_both_uses(reentrant, batch):
    model = decoder(kind=reentrant)
    model.blocks[1] = model.blocks[0]
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            step(engine, batch)
            assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["held"] * 2


def test_a_layer_that_is_used_twice_inside_one_block_is_recomputed_with_it(batch):
    model = decoder()
    model.blocks[0].k = model.blocks[0].q
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            step(engine, batch)
            assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["recomputed"] * 2


def test_paths_are_those_of_a_block_that_runs_again_wherever_its_uses_are_combined(batch, monkeypatch):
    """Its norms and its sums are of the same values only if nothing is kept for one of them alone."""
    model = decoder()
    model.blocks[0].k = model.blocks[0].q
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        step(engine, batch)
        asked = []
        rules, of_product = engine.path_rules, engine.path_rules.of_product
        token_losses(model, batch).mean().backward()
        engine.blocks.flush()
        monkeypatch.setattr(
            rules, "of_product", lambda *a, **k: asked.append(rules.runs_again()) or of_product(*a, **k)
        )
        engine.finish()
    assert asked and all(asked)


@KINDS
def test_a_weight_shared_by_two_blocks_is_normed_with_both_uses(reentrant, batch):
    model = decoder(kind=reentrant)
    model.blocks[1].out.weight = model.blocks[0].out.weight
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            step(engine, batch)
            assert_sums(model, clipped(gradients, c))
    assert "blocks.0.out.weight is used elsewhere" in engine.explain().blocks[0].why


@KINDS
def test_tied_embeddings_outside_frozen_parts_inside_and_units_without_a_family(reentrant, batch):
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(8))

        def forward(self, x):
            return x * self.scale

    model = decoder(kind=reentrant, tied=True)
    model.blocks[0].q.requires_grad_(False)
    model.blocks[0].norm2.weight.requires_grad_(False)
    model.blocks[1].mlp.append(Scale())
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            step(engine, batch)
            assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["recomputed"] * 2


@KINDS
def test_layers_that_backward_passes_before_it_runs_the_block_again_are_not_lost(reentrant):
    """A sum saves nothing for backward: only the layer before it makes torch run the block."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 6))

        def forward(self, x):
            return x + self.table

    class Model(OneBlock):
        def __init__(self) -> None:
            super().__init__(reentrant)
            positions = Positions()
            self.block = nn.Sequential(self.block, positions, nn.Tanh(), positions, Positions())

    def losses(model, x):
        return model(x).sin().sum((1, 2))

    model, x = Model(), torch.randn(3, 5, 6, requires_grad=True)
    gradients = true_gradients(nn.Sequential(model.block, model.last), x, losses)
    c = some_clipped(gradients)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        losses(model, x).mean().backward()
        engine.finish()
    truth = clipped(gradients, c)
    names = {
        name: name.replace("0.", "block.", 1) if name[0] == "0" else name.replace("1.", "last.", 1) for name in truth
    }
    assert_sums(model, {names[name]: total for name, total in truth.items()})
    assert how(engine) == ["recomputed"]


@KINDS
@pytest.mark.parametrize("where", ["before", "inside"])
def test_samples_that_are_not_finite_stay_out(reentrant, where, batch):
    """The first sample has inf in its activations, from before the block or made in it."""

    class Overflow(nn.Module):
        on = False

        def forward(self, x):
            return torch.cat([x[:1] * torch.inf, x[1:]]) if self.on else x

    model, overflow = decoder(kind=reentrant), Overflow()
    if where == "before":
        model.tokens = nn.Sequential(model.tokens, overflow)
    else:
        model.blocks[1].mlp.insert(1, overflow)
    gradients, c = truth_of(model, {key: value[1:] for key, value in batch.items()})
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        step(engine, batch)
        model.zero_grad()
        overflow.on = True
        step(engine, batch)
    assert int(engine.nonfinite_samples) == 1
    assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["recomputed"] * 2


@KINDS
def test_sums_over_positions_are_held_where_they_are_small_and_not_made_again(reentrant, monkeypatch):
    """Of biases and norm layers, in blocks whose samples are long."""
    made = []
    for kernel in (Recorder.bias_sums, Recorder.layer_norm_sums):

        def counted(*args, kernel=kernel, **options):
            made.append(kernel.__name__)
            return kernel(*args, **options)

        monkeypatch.setattr(Recorder, kernel.__name__, staticmethod(counted))
    torch.manual_seed(1)
    batch = token_batch(4, 64)
    model = decoder(kind=reentrant)
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        token_losses(model, batch).mean().backward()
        held = {slot.name for slot, _ in engine.contributions()}
        assert {"blocks.0.norm1.weight", "blocks.1.mlp.0.bias"} <= held
        assert "blocks.0.q.weight" not in held
        assert {"bias_sums", "layer_norm_sums"} <= set(made)
        made.clear()
        engine.finish()
        assert made == []
    assert how(engine) == ["recomputed"] * 2
    torch.testing.assert_close(engine.norms.double(), norms_of(gradients), rtol=1e-5, atol=0)
    assert_sums(model, clipped(gradients, c))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_every_optimizer_takes_the_same_step_as_with_held_blocks(kind, fused, batch):
    """The second step is a logical batch of two physical ones."""
    if fused and kind is torch.optim.RMSprop:
        pytest.skip("it has no fused update")
    found = []
    for budget in (None, "lean"):
        model = decoder(dropout=0.2)
        with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget) as engine:
            optimizer = DPFlashOptimizer(
                kind(model.parameters(), lr=0.01),
                engine=engine,
                noise_multiplier=0.5,
                max_grad_norm=0.1,
                expected_batch_size=4,
                generator=torch.Generator().manual_seed(3),
                fused=fused,
            )
            for skips in ([False], [True, False]):
                for skip in skips:
                    optimizer.signal_skip_step(do_skip=skip)
                    token_losses(model, batch).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_sums_of_half_precision_parameters_are_as_wide_as_those_of_held_blocks(batch):
    found = []
    for budget in (None, "lean"):
        model = decoder().to(torch.bfloat16)
        with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget, path="gram", loss_scale=8.0) as engine:
            (token_losses(model, batch).mean() * 8.0).backward()
            sums = dict(engine.clipped_sums())
            found.append([engine.norms, *(sums[parameter] for parameter in model.parameters())])
    for held, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, held, rtol=1e-5, atol=1e-7)


def test_what_a_lean_step_holds_after_backward_is_the_boundaries_of_its_blocks():
    """Bytes that backward leaves allocated, by torch's profiler."""
    held = {}
    for budget in (None, "lean"):
        model, batch = decoder(layers=4, width=32), token_batch(4, 8)
        with FlashEngine(model, max_grad_norm=0.1, memory_budget=budget) as engine:
            step(engine, batch)
            model.zero_grad()
            with torch.profiler.profile(profile_memory=True) as profile:
                token_losses(model, batch).mean().backward()
            events = profile.profiler.kineto_results.events()
            held[budget] = sum(event.nbytes() for event in events if event.name() == "[memory]")
    row = 4 * 8 * 4  # bytes of one feature: samples, positions, float32
    boundaries = 4 * 2 * 32 * row
    outside = row * (17 + 32 + 32 + 32 + 2)  # x and g of the head, g of the embeddings, ids
    small = 4 * (torch.get_rng_state().nbytes + 200)  # random states, norms
    layers = 4 * row * (32 + 3 * 32 + 32 + 32 + 32 + 64 + 64 + 32)  # x of q, k, v is one tensor
    assert boundaries < held["lean"] < boundaries + outside + small
    assert held[None] > layers


class MLPBlock(nn.Module):
    """`ends`: what follows its last product."""

    def __init__(self, ends: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.ends, self.reentrant = nn.Linear(8, 32), nn.Linear(32, 8), ends, reentrant

    def block(self, x):
        return x + self.ends(self.last(torch.tanh(self.first(x))))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("ends", "reentrant", "products"),
    [
        (nn.Identity(), False, 1),
        (nn.Tanh(), False, 2),  # its backward reads what it gives
        (nn.Linear(8, 8).requires_grad_(False), False, 2),  # torch saves its weight after that product
        (nn.Identity(), True, 2),  # torch runs all of a reentrant block again
    ],
    ids=["sum", "tanh", "frozen", "reentrant"],
)
def test_products_whose_values_nobody_reads_are_not_made_again(ends, reentrant, products, monkeypatch):
    torch.manual_seed(0)
    model = MLPBlock(ends, reentrant)
    x = torch.randn(4, 5, 8, requires_grad=True)  # as a reentrant block wants it
    gradients = true_gradients(model, x, lambda model, x: model.block(x).square().mean((1, 2)))
    made = []
    linear = Recorder.linear
    monkeypatch.setattr(Recorder, "linear", lambda *args: (made.append(1), linear(*args))[1])
    with FlashEngine(model, max_grad_norm=some_clipped(gradients), memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
            made.clear()
            engine.finish()
        assert how(engine) == ["recomputed"]
        assert len(made) == products
        assert_sums(model, clipped(gradients, engine.max_grad_norm))


def test_blocks_run_again_where_opacus_users_say_so_in_make_private():
    model = OneBlock()
    data = TensorDataset(torch.randn(8, 16, 6))
    privacy_engine = PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        memory_budget="lean",
    )
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    assert set(how(privacy_engine.flash_engine)) == {"recomputed"}


class ManyOutputs(nn.Module):
    """Outputs of which one is not used, one needs no gradient and one is a number; arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.aside, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.wide = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))
        self.on = True

    def block(self, x, *, mask, scale):
        h = self.wide(self.first(x) * mask)
        return h * scale, {"unused": self.aside(h), "used": (self.second(h), mask)}, 3

    def forward(self, x):
        mask = torch.linspace(0, 1, x.shape[1]).view(1, -1, 1)
        run = functools.partial(checkpoint, self.block, use_reentrant=False) if self.on else self.block
        h, more, number = run(x, mask=mask, scale=0.5)
        h += 1.0  # in place, on what the block gave back
        return self.last(h * number + more["used"][0])


def test_blocks_with_keywords_and_several_outputs_one_changed_in_place():
    def losses(model, x):
        return model(x).sin().sum((1, 2))

    model, x = ManyOutputs(), torch.randn(3, 5, 6)
    model.on = False
    gradients = true_gradients(model, x, losses)
    model.on, c = True, some_clipped(gradients)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        losses(model, x).mean().backward()
        engine.finish()
    assert_sums(model, clipped(gradients, c))
    assert how(engine) == ["recomputed"]


def test_checkpoint_sequential_and_selective_checkpoints_are_blocks_like_others(batch):
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    class Sequence(CheckpointedDecoder):
        def forward(self, ids):
            if self.kind is None:
                return super().forward(ids)
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]).unsqueeze(0))
            x = checkpoint_sequential(list(self.blocks[:2]), 2, x, use_reentrant=False)
            x = checkpoint(self.blocks[2], x, use_reentrant=False, context_fn=policy)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Sequence(layers=3)
    gradients, c = truth_of(model, batch)
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        step(engine, batch)
    assert_sums(model, clipped(gradients, c))
    assert how(engine).count("recomputed") >= 2


def test_layers_that_are_frozen_between_steps_change_nothing_for_the_others(batch):
    model = decoder()
    layer = model.blocks[0].mlp[0]
    truths = {}
    for trained in (True, False):
        layer.requires_grad_(trained)
        truths[trained] = clipped(true_gradients(model, batch, token_losses), 0.1)
    with FlashEngine(model, max_grad_norm=0.1, memory_budget=1) as engine:
        for number in range(5):
            trained = number % 3 != 2
            layer.requires_grad_(trained)
            engine.zero_grad()
            step(engine, batch)
            assert_sums(model, truths[trained])

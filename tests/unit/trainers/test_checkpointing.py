"""Checkpointed blocks change what is kept, never what is computed; what cannot be computed so is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.oracle import run_oracle
from dpscope.runner.steps import assemble
from dpscope.trainers.base import StandardTrainer
from dpscope.trainers.flash import DPFlashClippingTrainer
from dpscope.trainers.modes import Checkpointed, checkpoint_blocks
from dpscope.vocabulary.settings import TrainerSettings
from dpscope.workloads.workload import build_workload
from tests.unit.trainers.steps import (
    LEARNING_RATE,
    SMALL,
    applied_sums,
    assert_agree,
    oracle_sums,
    spec_of,
    sums_of_a_step,
)


class Block(nn.Module):
    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4)) if bare else 1.0

    def forward(self, x):
        return x + self.scale * self.last(self.first(x).tanh())


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Stack):
    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(0).flip(0) * 0.5)


MODELS = {
    "a list": lambda: Stack(Block(), Block()),
    "a list of one": lambda: Stack(Block()),
    "a sequence": lambda: nn.Sequential(nn.Linear(4, 4), Block(), nn.ReLU(), Block(), nn.Linear(4, 2)),
    "sequences": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))),
    "deep inside": lambda: nn.Sequential(nn.Identity(), Stack(Block(), Block())),
    "with a bare parameter": lambda: Stack(Block(bare=True), Block(bare=True)),
    "called twice": lambda: Twice(Block(), Block()),
}


def loss(model, batch):
    return model(batch).square().sum(dim=tuple(range(1, batch.dim())))


@pytest.mark.parametrize(("method", "budget"), [("standard", "auto"), ("flash", "auto"), ("flash", "lean")])
@pytest.mark.parametrize("name", SMALL)
def test_a_step_with_checkpointed_blocks_is_that_of_micro_batches_of_one(name, method, budget):
    spec = spec_of(name, method, checkpoint_blocks=True, memory_budget=budget, max_grad_norm=0.1)
    assert_agree(sums_of_a_step(spec), oracle_sums(spec))


@pytest.mark.parametrize("budget", ["auto", "lean"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_ones_own_model_are_found_and_flash_clipping_stays_exact(name, budget):
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(3, 5, 4)
    wanted = run_oracle(model, batch, lambda m, b: loss(m, b).mean(), max_grad_norm=0.5).clipped_sums
    settings = {"batch_size": 3, "optimizer": "sgd", "learning_rate": LEARNING_RATE, "noise_multiplier": 0.0}
    how = TrainerSettings(**settings, max_grad_norm=0.5, checkpoint_blocks=True, memory_budget=budget)
    trainer = DPFlashClippingTrainer(model, loss, how)
    assert any(isinstance(module, Checkpointed) for module in model.modules())
    assert_agree(applied_sums(trainer, [batch], 3), {name: sum_.double() for name, sum_ in wanted.items()})


@pytest.mark.parametrize("name", SMALL)
def test_backward_runs_the_forward_of_every_block_once_more(name):
    """Counted at the layers inside blocks, of which none keeps its input."""
    before, after = (calls_in_a_step(name, checkpointed) for checkpointed in (False, True))
    again = [more - once for once, more in zip(before, after, strict=True)]
    assert set(again) == {0, 1}
    assert sum(again) > len(again) / 3  # much of each of these models is blocks


def calls_in_a_step(name, checkpointed):
    trainer, batches = assemble(spec_of(name, "standard", checkpoint_blocks=checkpointed))
    calls = dict.fromkeys(trainer.plain_model.modules(), 0)
    for module in calls:
        module.register_forward_hook(lambda module, *_: calls.update({module: calls[module] + 1}))
    trainer.train_step(*batches)
    return calls.values()


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        nn.ModuleList([nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleList([nn.Linear(3, 3)])]),
    ],
)
def test_a_model_without_blocks_is_refused(model):
    with pytest.raises(UserError, match="no blocks to checkpoint"):
        checkpoint_blocks(model)


class PastModules(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


@pytest.mark.parametrize("model", ["past its modules", "in evaluation mode"])
def test_a_model_that_goes_by_its_checkpoints_is_refused(model):
    """Its rows would be called checkpointed and be none."""
    how = TrainerSettings(batch_size=2, checkpoint_blocks=True)
    if model == "past its modules":
        trainer, batch = StandardTrainer(PastModules(Block(), Block()), loss, how), torch.randn(2, 5, 4)
    else:
        workload = build_workload(SMALL["gpt2"], batch_size=2, seq_len=8)
        trainer = StandardTrainer(workload.model().eval(), workload.loss, how)
        batch = workload.batch(0, torch.device("cpu"))
    with pytest.raises(UserError, match=r"ran without checkpoints: .* leave out --checkpoint-blocks"):
        trainer.train_step(batch)


def test_a_copy_of_a_checkpointed_model_is_a_model_of_its_own():
    model = MODELS["a list"]()
    checkpoint_blocks(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(torch.randn(2, 4)).any()
    assert [name for name, _ in other.named_parameters()] == [n for n, _ in MODELS["a list"]().named_parameters()]


@pytest.mark.parametrize("method", ["flat", "ghost"])
@pytest.mark.parametrize("name", SMALL)
def test_opacus_cannot_train_checkpointed_blocks_and_is_not_let(name, method):
    with pytest.raises(UserError, match="Opacus cannot train checkpointed blocks"):
        assemble(spec_of(name, method, checkpoint_blocks=True))
    # Without that refusal it raises, too: if one day it does not, this test asks whether it has learned to.
    trainer, batches = assemble(spec_of(name, method))
    checkpoint_blocks(trainer.plain_model)
    with pytest.raises(UserError, match=r"no per-sample gradient reaches|Parameter tying is not supported"):
        trainer.train_step(*batches)

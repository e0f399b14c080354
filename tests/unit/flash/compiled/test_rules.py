"""Compiled models under every clipping rule, and with several rows for each sample."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.flash import FlashEngine, run_oracle
from dpscope.flash.gradients.clip_rules import CLIP_RULES
from tests.torch_here import takes_compiled
from tests.unit.flash.agreement import one_loss
from tests.unit.flash.compiled.compiling import Graphs

pytestmark = takes_compiled

IDS = torch.tensor([3, 1, 3, 1, 1, 8])


class Small(nn.Module):
    """Positions and layers of several kinds, in a checkpoint if it is `checkpointed`. x: (B, T, 3)."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sin().sum((1, 2))


@pytest.mark.parametrize("rows", [{}, {"rows_per_sample": 2}, {"ids": IDS}], ids=["rows", "views", "users"])
@pytest.mark.parametrize("name", CLIP_RULES)
def test_a_graph_s_layers_follow_the_rule(name: str, rows: dict[str, object]) -> None:
    model, x = Small().double(), torch.randn(6, 4, 3, dtype=torch.float64)
    bounds = {"*norm*": 0.1, "*": 0.3} if name == "per_group" else 0.3
    truth = run_oracle(copy.deepcopy(model), x, one_loss(losses), max_grad_norm=bounds, clipping=name, **rows)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    each = rows.get("rows_per_sample", 1)
    with FlashEngine(compiled, max_grad_norm=bounds, clipping=name, rows_per_sample=each) as engine:
        for _ in range(2):
            engine.zero_grad()
            loss = losses(compiled, x).mean()
            if "ids" in rows:
                engine.group_rows(IDS)
            loss.backward()
            engine.finish()
    assert graphs.count == 1
    torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-9, atol=0)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.clipped_sums[key], rtol=1e-8, atol=1e-12, msg=f"{name} {key}")


@pytest.mark.parametrize("budget", [None, "lean", 2**30])
@pytest.mark.parametrize("name", ["flat", "per_layer"])
def test_a_checkpoint_in_a_graph_follows_the_rule_under_every_budget(name: str, budget) -> None:
    """The model is verified eagerly, where the block might run again: nothing of that reaches the step."""
    model, x = Small().double(), torch.randn(6, 4, 3, dtype=torch.float64)
    model.checkpointed = True
    truth = run_oracle(copy.deepcopy(model), x, one_loss(losses), max_grad_norm=0.3, clipping=name)
    compiled = torch.compile(model, backend=Graphs())
    with FlashEngine(compiled, max_grad_norm=0.3, clipping=name, memory_budget=budget) as engine:
        for _ in range(3):
            engine.zero_grad()
            losses(compiled, x).mean().backward()
            engine.finish()
            torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-9, atol=0)
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, truth.clipped_sums[key], rtol=1e-8, atol=1e-12, msg=key)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("budget", [None, "lean"])
def test_compiled_blocks_in_checkpoints_are_exact_under_every_budget(budget, scaled) -> None:
    """torch saves other tensors of a compiled block where verification looks on, so that it looks at eager ones.

    So does a model that runs sample by sample, because its own parameter is used inside of checkpoints.
    """

    class Blocks(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.children():
                run = (lambda x, block=block: block(x) * self.scale) if scaled else block
                x = checkpoint(run, x, use_reentrant=False)
            return x

    model, x = Blocks(Small(), nn.Linear(2, 3), Small()), torch.randn(6, 4, 3, dtype=torch.float64)
    if scaled:
        model.scale = nn.Parameter(torch.tensor(1.5))
    model.double()
    truth = run_oracle(copy.deepcopy(model), x, one_loss(losses), max_grad_norm=0.3)
    for block in model:
        block.compile(backend=Graphs())
    with FlashEngine(model, max_grad_norm=0.3, memory_budget=budget) as engine:
        for _ in range(3):
            engine.zero_grad()
            losses(model, x).mean().backward()
            engine.finish()
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, truth.clipped_sums[key], rtol=1e-8, atol=1e-12, msg=key)

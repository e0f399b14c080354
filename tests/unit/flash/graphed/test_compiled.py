"""Compiled models inside a graph: captured once, compiled no second time, in the weights of the eager loop."""

import pytest
import torch
from torch import nn

from dpscope.flash import make_graphed_step
from dpscope.trainers.modes import CompileCounts
from tests.torch_here import takes_compiled
from tests.unit.flash.graphed.loops import (
    WIDTH,
    assert_same,
    batches,
    loss_of,
    network,
    private,
    trained_by_loop,
)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
        self.head = network()

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def compiled_before(model):
    model = torch.compile(model, backend="aot_eager")
    return model, private(model)


def compiled_after(model):
    optimizer = private(model)
    return torch.compile(model, backend="aot_eager"), optimizer


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model, private(model)


def compiled_by_block(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model, private(model)


@takes_compiled
@pytest.mark.parametrize("compiled", [compiled_before, compiled_after, compiled_in_place, compiled_by_block])
def test_a_compiled_model_ends_in_the_weights_of_the_eager_loop(host_graphs, compiled):
    torch._dynamo.reset()
    by_loop, model = Blocks(), Blocks()
    trained_by_loop(by_loop, private(by_loop), list(batches()))
    given, optimizer = compiled(model)
    step = make_graphed_step(loss_of(given), optimizer)
    data = list(batches())
    for x, y in data[:2]:
        step(x, y)
    before = CompileCounts.now()
    assert before.graphs
    for x, y in data[2:]:
        step(x, y)
    assert CompileCounts.now() == before
    assert_same(by_loop, model)
    assert host_graphs.captures == 1
    assert step.replays >= 6

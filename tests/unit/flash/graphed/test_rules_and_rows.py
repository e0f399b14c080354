"""Clipping rules and groups of rows inside a graph."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step, pad_batch, real_rows
from dpscope.flash.step.microbatch import StaticInputs
from dpscope.flash.torch_side.captures import OwnCapture, capturing, device_cache
from tests.unit.flash.graphed.loops import (
    CHANGED,
    CLASSES,
    WIDTH,
    assert_trains_alike,
    batches,
    loss_of,
    network,
    private,
)


@pytest.mark.parametrize("clipping", ["normalised", "psac", "adaptive"])
def test_other_rules_are_those_of_the_loop(host_graphs, clipping):
    assert_trains_alike(host_graphs, lambda model: private(model, clipping=clipping), batches)


def test_rows_of_one_sample_are_those_of_the_loop(host_graphs):
    def make(model):
        engine = FlashEngine(model, max_grad_norm=0.5, rows_per_sample=2)
        noise = torch.Generator().manual_seed(5)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "expected_batch_size": 2}
        return DPFlashOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), engine=engine, generator=noise, **options)

    step = assert_trains_alike(host_graphs, make, batches)
    assert step.engine.norms.shape == (2,)


def test_rows_of_one_user_run_eagerly(host_graphs):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    for number, (x, y) in enumerate(batches()):
        if number > CHANGED:
            optimizer.engine.group_rows(torch.arange(len(x)) // 2)
        step(x, y)
        assert len(optimizer.engine.norms) == (2 if number > CHANGED else 4)


def test_rows_that_the_loss_groups_are_refused_in_a_graph(host_graphs):
    model = network()
    optimizer = private(model)

    def loss(x, y):
        found = F.cross_entropy(model(x), y)
        optimizer.engine.group_rows(torch.arange(len(x)) // 2)
        return found

    step = make_graphed_step(loss, optimizer)
    with pytest.raises(UserError, match="group_rows"):
        for x, y in batches():
            step(x, y)


def test_a_table_that_a_graph_reads_outlives_the_cache_that_made_it():
    @device_cache(1)
    def table(size):
        return torch.arange(size)

    first, capture = table(3), OwnCapture()
    with capturing(capture):
        assert table(3) is first
    table(4)  # drops it from the cache
    assert table(3) is not first
    assert capture.kept == [first]


def test_a_rule_that_learns_counts_by_the_bound_that_a_replay_is_given(host_graphs):
    model = network()
    optimizer = private(model, clipping="adaptive")
    engine = optimizer.engine
    x, y = next(iter(batches(1)))
    for _ in range(2):
        loss_of(model)(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.max_grad_norm = 1e-6  # every sample is clipped by now
    static = StaticInputs(engine.clip, len(x), torch.device("cpu"))
    static.bounds.fill_(1e6)  # as a later replay may be given
    with capturing(OwnCapture()), engine.capturing(static):
        loss_of(model)(x, y).backward()
        engine.accumulate()
        assert float(engine.captured()[1].observed) == len(x) / 2


@pytest.mark.parametrize("name", ["gamma", "loss_scale"])
def test_a_constant_of_the_rule_or_the_engine_is_noticed(host_graphs, name):
    def between(number, optimizer):
        if number == CHANGED:
            setattr(optimizer.engine.clip if name == "gamma" else optimizer.engine, name, 0.5)

    assert_trains_alike(host_graphs, lambda model: private(model, clipping="automatic"), batches, between)
    assert host_graphs.captures == 2


def test_a_number_of_real_rows_is_refused_in_a_graph(host_graphs):
    model = network()

    def loss(x, y):
        return F.cross_entropy(model(x), y, reduction="none")[: real_rows(x)].mean()

    step = make_graphed_step(loss, private(model))
    with pytest.raises(UserError, match="real_rows gives a number"):
        for x, y in batches():
            step(*pad_batch((x[:3], y[:3]), 4))


def test_a_layer_that_the_host_drops_at_random_is_refused(host_graphs):
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = x + self.first(x) * (random.random() >= 0.0)
            return self.second(x)

    model = Depth()
    step = make_graphed_step(loss_of(model), private(model))
    with pytest.raises(UserError, match="random numbers on the CPU"):
        for x, y in batches():
            step(x, y)

"""A graphed step trains as the ordinary loop does, whatever changes between its replays."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step, pad_batch
from dpscope.flash.torch_side.captures import is_captured
from tests.unit.flash.graphed.loops import (
    CLASSES,
    STEPS,
    WIDTH,
    assert_same,
    assert_trains_alike,
    batches,
    loss_of,
    network,
    private,
    trained_by_graph,
    trained_by_loop,
)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_a_graphed_step_ends_in_the_weights_of_the_loop(host_graphs, optimizer, clipping):
    assert_trains_alike(host_graphs, lambda m: private(m, optimizer, clipping=clipping), batches)


def test_each_shape_has_a_graph_of_its_own(host_graphs):
    step = assert_trains_alike(host_graphs, private, lambda: batches(20, sizes=(4, 3, 2)))
    assert host_graphs.captures == 3
    assert step.replays < 20


def test_dropout_draws_other_masks_in_each_replay(host_graphs):
    assert_trains_alike(host_graphs, private, batches, dropout=0.5)


def test_a_learning_rate_a_bound_and_a_noise_multiplier_that_change_take_effect(host_graphs):
    def between(number, optimizer):
        optimizer.original_optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)
        optimizer.max_grad_norm = 0.5 + 0.1 * number
        optimizer.noise_multiplier = 1.0 + 0.2 * number

    assert_trains_alike(host_graphs, private, batches, between)


def test_freezing_a_layer_is_noticed_and_captured_anew(host_graphs):
    def between(number, optimizer):
        if number == 6:
            next(iter(optimizer.engine.parameters)).requires_grad_(False)

    assert_trains_alike(host_graphs, private, batches, between)
    assert host_graphs.captures == 2


def test_a_hook_and_a_mode_are_noticed(host_graphs):
    def between(number, optimizer):
        model = optimizer.engine.model
        if number == 5:
            model[1].register_forward_hook(lambda module, args, output: 0.5 * output)
        if number == 9:
            model[2].eval()

    assert_trains_alike(host_graphs, private, batches, between, dropout=0.3)


def test_logical_batches_add_up(host_graphs):
    def between(number, optimizer):
        optimizer.signal_skip_step(number % 3 != 2)

    assert_trains_alike(host_graphs, private, lambda: batches(21), between)
    assert host_graphs.captures == 2  # one that begins the sums, one that adds to them


def test_padded_batches_and_an_empty_one_are_those_of_the_loop(host_graphs):
    def padded():
        for number, (x, y) in enumerate(batches(16)):
            real = (4, 2, 3, 0, 1)[number % 5]
            yield pad_batch((x[:real], y[:real]), 4) if real else (x[:0], y[:0])

    def loop(model, optimizer):
        for x, y in padded():
            losses = F.cross_entropy(model(x), y, reduction="sum") / 4
            losses.backward()
            optimizer.step()
            optimizer.zero_grad()

    by_loop, by_graph = network(), network()
    loop(by_loop, private(by_loop))
    optimizer = private(by_graph)
    step = make_graphed_step(lambda x, y: F.cross_entropy(by_graph(x), y, reduction="sum") / 4, optimizer)
    for x, y in padded():
        step(x, y)
    assert_same(by_loop, by_graph)
    assert step.replays


def test_norms_and_dropped_samples_are_those_of_the_last_replay(host_graphs):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    for number, (x, y) in enumerate(batches(8)):
        if number == 7:
            x[1] = float("nan")
        before = copy.deepcopy([p.detach() for p in model.parameters()])
        step(x, y)
    assert optimizer.engine.norms.shape == (4,)
    assert not optimizer.engine.norms[1].isfinite()
    assert int(optimizer.engine.nonfinite_samples) == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert len(before) == len(list(model.parameters()))


def test_steps_are_accounted_for_once_each(host_graphs):
    model = network()
    optimizer = private(model)
    counted = []
    optimizer.attach_step_hook(lambda each: counted.append(each.accumulated_iterations))
    step = make_graphed_step(loss_of(model), optimizer)
    for x, y in batches():
        step(x, y)
    assert counted == [1] * STEPS


def test_passes_that_are_to_be_looked_at_run_eagerly(host_graphs):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    for x, y in batches(16, sizes=(8,)):
        step(x, y)
    schedule = optimizer.engine.verification.schedule
    assert schedule.passes == 16
    assert {2, 4, 8, 16} <= set(schedule.looks)
    assert step.replays <= 16 - 4


def test_a_model_that_begins_to_mix_samples_is_still_found(host_graphs):
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixes = False
            self.layer = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            y = self.layer(x)
            return y - y.mean(0) if self.mixes else y

    model = Mixes()
    step = make_graphed_step(loss_of(model), private(model))
    data = list(batches(10))
    for x, y in data[:5]:
        step(x, y)
    model.mixes = True
    with pytest.raises(UserError, match="samples mix"):
        step(*data[5])


def test_what_cannot_be_captured_is_refused_when_the_step_is_made():
    model = network()
    with pytest.raises(UserError, match="make_private returned"):
        make_graphed_step(loss_of(model), torch.optim.SGD(model.parameters(), lr=0.1))
    engine = FlashEngine(model, memory_budget="lean")
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4}
    lean = DPFlashOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), engine=engine, **options)
    with pytest.raises(UserError, match="memory_budget"):
        make_graphed_step(loss_of(model), lean)


def test_without_gradients_it_is_refused():
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    with torch.no_grad(), pytest.raises(UserError, match="trains"):
        step(*next(batches()))


def test_on_a_cpu_it_is_the_ordinary_step():
    by_loop, by_graph = network(), network()
    trained_by_loop(by_loop, private(by_loop), list(batches()))
    step, _ = trained_by_graph(by_graph, private(by_graph), list(batches()))
    assert_same(by_loop, by_graph)
    assert not step.replays


class MixesInCaptures(nn.Module):
    """As models of transformers do that make masks in a capture only."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            x = x - x.mean(0)
        return self.network(x)


@pytest.fixture
def not_captured(monkeypatch):
    """What torch says where it has been built for GPUs."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_what_a_model_does_in_captures_alone_is_verified(host_graphs, not_captured):
    model = MixesInCaptures()
    step = make_graphed_step(loss_of(model), private(model))
    with pytest.raises(UserError, match="samples"):
        step(*next(batches(1)))
    assert not torch.cuda.is_current_stream_capturing()


def test_the_loss_sees_a_capture_in_every_pass(host_graphs, not_captured):
    model, seen = network(), []

    def loss(x, y):
        seen.append(torch.cuda.is_current_stream_capturing())
        return loss_of(model)(x, y)

    step = make_graphed_step(loss, private(model))
    for x, y in batches(4):
        step(x, y)
    assert host_graphs.captures == 1
    assert all(seen)
    assert not is_captured()

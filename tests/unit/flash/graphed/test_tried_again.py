"""A call of a graphed step that is tried again after an error: the batch counts once, or the draw is refused."""

from __future__ import annotations

import pytest
import torch

from dpscope.errors import UserError
from dpscope.flash import make_graphed_step
from dpscope.flash.engine import FlashEngine
from dpscope.flash.step import microbatch
from tests.unit.flash.graphed.loops import assert_same, batches, loss_of, network, private, trained_by_loop

PARTS = 3  # of a step


def announce(number, optimizer):
    optimizer.signal_skip_step(number % PARTS != PARTS - 1)


def fail(*args, **kwargs):
    raise torch.OutOfMemoryError("no room")


def after(calls, kept):
    """Return `kept` with an error after so many calls."""
    left = [None] * calls
    return lambda *args, **kwargs: kept(*args, **kwargs) if left and not left.pop() else fail()


FAILURES = {
    "backward": lambda patch: patch.setattr(FlashEngine, "add", after(1, FlashEngine.add)),
    "norms": lambda patch: patch.setattr(microbatch, "clip_factors", fail),
}


@pytest.mark.parametrize("failing", [0, 1, 2, 6, 8, 13])
@pytest.mark.parametrize("point", FAILURES)
def test_an_eager_batch_and_a_captured_one_that_are_tried_again_count_once(host_graphs, point, failing, monkeypatch):
    """Batches 13 and 14 have a shape of their own, which runs eagerly. Graphs are captured at batches 6 and 8."""
    data = [(x[:3], y[:3]) if number > 12 else (x, y) for number, (x, y) in enumerate(batches(15))]
    by_loop, by_graph = network(), network()
    trained_by_loop(by_loop, private(by_loop), data, announce)
    optimizer = private(by_graph)
    step = make_graphed_step(loss_of(by_graph), optimizer)
    for number, (x, y) in enumerate(data):
        announce(number, optimizer)
        if number == failing:
            if failing == 0:
                by_graph(x)  # verified, and dropped
                optimizer.zero_grad()
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                FAILURES[point](patch)
                step(x, y)
        step(x, y)
    assert_same(by_loop, by_graph)
    assert step.replays


@pytest.mark.parametrize(("failing", "refused"), [(12, False), (13, True), (14, True)])
def test_a_replay_that_fails_gives_up_a_draw_whose_sums_it_had(host_graphs, failing, refused, monkeypatch):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    before = None
    for number, (x, y) in enumerate(batches(18)):
        announce(number, optimizer)
        if number == 12:
            before = network()
            before.load_state_dict(model.state_dict())
        if number == failing:
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                for captured in step._captured.values():
                    patch.setattr(captured, "_replay", fail)
                step(x, y)
        if refused and failing <= number < 15:
            with pytest.raises(UserError, match="this draw was given up"):
                step(x, y)
            assert_same(model, before)
        else:
            step(x, y)
    assert not torch.equal(model[0].weight, before[0].weight)

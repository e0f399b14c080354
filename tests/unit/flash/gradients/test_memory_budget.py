"""What a step may hold, told by an allocator that plays back what a training step does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.gradients.memory_budget import Allocated, MemoryBudget, MemoryLimit, allocated_on

MB = 1 << 20
PARAMETERS = [nn.Parameter(torch.zeros(MB))]  # a gradient of 4 MiB


class Memory:
    """Megabytes in use, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def holds(self, megabytes: int) -> None:
        self.now = megabytes * MB
        self.peak = max(self.peak, self.now)

    def __call__(self) -> Allocated:
        return Allocated(self.now, self.peak)


def at_first_layer(budget: MemoryBudget, memory: Memory, *, before: int, loss: int, live: int) -> None:
    """Forward starts with `before`, the loss takes up to `loss`, `live` is left at backward's first layer."""
    memory.holds(before)
    budget.begin_forward()
    memory.holds(loss)
    memory.holds(live)
    budget.begin_backward()


def started(limit: MemoryLimit = None, *, before: int = 100, loss: int = 150, live: int = 140) -> tuple:
    memory = Memory()
    budget = MemoryBudget(limit, PARAMETERS, memory)
    at_first_layer(budget, memory, before=before, loss=loss, live=live)
    return budget, memory


def test_kept_gradients_may_take_what_backward_has_freed_up_to_the_peak_of_forward_and_loss():
    budget, memory = started(before=100, loss=150, live=140)
    assert budget.fits(10 * MB)
    assert not budget.fits(10 * MB + 1)
    memory.holds(120)  # activations are freed
    assert budget.fits(30 * MB)
    assert not budget.fits(30 * MB + 1)


def test_or_up_to_where_all_gradients_would_be():
    budget, _ = started(before=100, loss=101, live=101)
    assert budget.fits(3 * MB)
    assert not budget.fits(3 * MB + 1)


def test_gradients_that_are_there_already_are_not_counted_twice():
    parameter = nn.Parameter(torch.zeros(MB))
    parameter.grad = torch.zeros(MB)
    memory = Memory()
    budget = MemoryBudget(None, [parameter], memory)
    at_first_layer(budget, memory, before=100, loss=101, live=101)
    assert not budget.fits(1)


def test_the_peak_does_not_creep_up_from_step_to_step():
    """What a step itself takes at its peak is no ordinary training's: the next step's budget is what it was."""
    budget, memory = started(before=100, loss=150, live=140)
    memory.holds(155)  # a temporary besides what was kept
    for _ in range(3):
        at_first_layer(budget, memory, before=100, loss=150, live=140)
        assert budget.fits(10 * MB)
        assert not budget.fits(11 * MB)
        memory.holds(160)


def test_a_forward_that_something_larger_hides_counts_with_what_is_live():
    memory = Memory()
    memory.holds(500)  # an evaluation before training
    budget = MemoryBudget(None, PARAMETERS, memory)
    at_first_layer(budget, memory, before=100, loss=150, live=140)
    assert budget.fits(0)
    assert not budget.fits(1)


def test_a_number_of_bytes_is_a_limit_on_all_memory():
    budget, _ = started(130 * MB, live=120)
    assert budget.fits(10 * MB)
    assert not budget.fits(10 * MB + 1)


@pytest.mark.parametrize("limit", [None, "lean", 10**12])
def test_nothing_more_is_held_where_memory_is_not_counted_or_is_to_be_lean(limit):
    counted = MemoryBudget("lean", PARAMETERS, Memory())
    uncounted = MemoryBudget(limit, PARAMETERS)
    assert allocated_on(torch.device("cpu")) is None
    for budget in (counted, uncounted):
        budget.begin_forward()
        budget.begin_backward()
        assert not budget.fits(0)


def test_nothing_is_kept_before_backward_has_begun_or_for_the_next_batch():
    budget, memory = started()
    assert budget.fits(0)
    memory.holds(100)
    budget.begin_forward()
    assert not budget.fits(0)


@pytest.mark.parametrize("limit", [0, -5, float("nan"), "leaner", "8GB", True, [1], torch.tensor(5.0)])
def test_another_budget_is_refused_in_a_sentence(limit):
    with pytest.raises(UserError, match='memory_budget must be a number of bytes above 0, "lean" or None, not'):
        MemoryBudget(limit, PARAMETERS)


# -- in an engine ------------------------------------------------------------------------------------------------------


class Watched(MemoryBudget):
    """What an engine tells its budget, in order."""

    def __init__(self, model: nn.Module, *, room: bool = True) -> None:
        super().__init__(None, list(model.parameters()), Memory())
        self.told, self.has_room = [], room

    def begin_forward(self) -> None:
        super().begin_forward()
        self.told.append("forward")

    def begin_backward(self) -> None:
        if not self._in_backward:
            self.told.append("backward")
        super().begin_backward()

    def close(self) -> None:
        if self._in_backward:
            self.told.append("closed")
        super().close()

    def fits(self, more: float) -> bool:
        assert self._in_backward
        self.told.append("asked")
        return self.has_room


class Checkpointed(nn.Module):
    """Short samples of narrow float32 layers: kept only where there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("closed_by", ["finish", "the next forward pass", "zero_grad"])
def test_an_engine_tells_its_budget_where_a_micro_batch_begins_and_ends(room, closed_by, monkeypatch):
    """A checkpoint's forward inside backward begins nothing."""
    model = Checkpointed()
    x = torch.randn(2, 192, 512)
    budget = Watched(model, room=room)
    monkeypatch.setattr("dpscope.flash.engine.MemoryBudget", lambda limit, parameters: budget)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(x)  # verification are over afterwards
        engine.verification.schedule.pause()
        model.zero_grad()
        budget.told.clear()
        for _ in range(2):
            model(x).sin().mean().backward()
            if closed_by == "finish":
                engine.finish()
            elif closed_by == "zero_grad":
                model.zero_grad()
        model(x)
        paths = {row.path for row in engine.explain()}
    assert budget.told == [*["forward", "backward", "asked", "asked", "closed"] * 2, "forward"]
    assert paths == {"keep" if room else "gram"}

"""Sums of gradients under a mode: memory as torch's allocator sees it where no mode watches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.forecast.cards import CARDS
from dpscope.forecast.fake_device import DEVICE, open_device
from dpscope.instruments import gradient_sums
from dpscope.instruments.memory import Tracker
from tests.unit.instruments.memory.allocator_events import allocator_peak

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "_use_count"), reason="this torch does not tell counts")

WIDTH = 256
SIZE = 4 * WIDTH**2  # bytes of w and of each of its gradients; all else is small
HELD: list[torch.Tensor] = []


class Holding(torch.autograd.Function):
    """Identity whose backward pass keeps the gradient, as an engine for private training does."""

    @staticmethod
    def forward(ctx, w):
        return w.view_as(w)

    @staticmethod
    def backward(ctx, g):
        HELD.append(g)
        return g


class AddingInPython(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return None, (x.T @ g) + (x.T @ g)


def embedded(x, w):
    return F.embedding(torch.arange(3, device=w.device), w)


MODELS = {
    "two uses": lambda x, w: x @ w + (2 * x) @ w,
    "three uses": lambda x, w: x @ w + (2 * x) @ w + (3 * x) @ w,
    "a gradient that is held": lambda x, w: (2 * x) @ w + x @ Holding.apply(w),
    "gradients that are views": lambda x, w: x @ w.T + (2 * x) @ w.T,
    "a tied embedding": lambda x, w: embedded(x, w) @ w,
    "a tied embedding whose head is a view": lambda x, w: embedded(x, w) @ w.T,
    "a sum in Python": AddingInPython.apply,
}
EACH = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def backward(model, x, w):
    model(x, w).sum().backward()
    w.grad = None
    HELD.clear()


def on(device):
    return torch.ones(3, WIDTH, device=device), torch.ones(WIDTH, WIDTH, device=device, requires_grad=True)


@EACH
def test_the_tracked_peak_is_that_of_a_backward_pass_that_nobody_watches(model):
    given = on("cpu")
    seen = allocator_peak(lambda: backward(model, *given))
    tracker = Tracker("cpu", nn.Identity(), lambda: [("inputs", "", tensor) for tensor in given])
    with tracker.tracking():
        backward(model, *given)
    sizes: dict[int, int] = {}
    peak = 0
    for kind, index, nbytes in tracker.record.events:
        if kind in (0, 1, 2):  # born, died, resized
            sizes[index] = 0 if kind == 1 else nbytes
        peak = max(peak, sum(sizes.values()))
    assert (peak - SIZE) // SIZE == seen.growth_outside // SIZE


@EACH
def test_the_planned_peak_is_that_of_a_backward_pass_that_nobody_watches(model):
    given = on("cpu")
    seen = allocator_peak(lambda: backward(model, *given))
    with open_device(CARDS["h200"]) as device:
        given = on(DEVICE)
        before = device.allocator.current
        device.allocator.segments.step_peak = 0
        backward(model, *given)
        grown = device.allocator.segments.step_peak - before
    assert grown // SIZE == seen.growth // SIZE


def test_a_gradient_that_is_added_to_in_place_has_the_value_of_a_sum():
    (x, alone), (_, tracked) = on("cpu"), on("cpu")
    MODELS["three uses"](x, alone).sum().backward()
    with Tracker("cpu", nn.Identity(), list).tracking():
        MODELS["three uses"](x, tracked).sum().backward()
    assert torch.equal(tracked.grad, alone.grad)


def test_counts_are_learned_anew_for_each_use(monkeypatch):
    """torch.compile changes them, so those of an earlier use may not hold any more."""
    monkeypatch.setattr(gradient_sums, "_alone", [(99, 99, 99)])
    given = on("cpu")
    with Tracker("cpu", nn.Identity(), lambda: [("inputs", "", tensor) for tensor in given]).tracking() as record:
        backward(MODELS["two uses"], *given)
    born = [index for kind, index, nbytes in record.events if kind == 0 and nbytes == SIZE]
    assert len(born) == 3  # the weight and two gradients, no sum beside them

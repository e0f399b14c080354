"""A checkpoint around tapped layers stops where it would stop around torch's own."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dpscope.flash import FlashEngine


class Calls(TorchDispatchMode):
    """How often layers of so many outputs computed."""

    def __init__(self, *operators) -> None:
        super().__init__()
        self.operators, self.outputs = operators, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        if function in self.operators:
            self.outputs.append(answer.shape[1 if answer.dim() == 3 and "conv" in str(function) else -1])
        return answer


def linear_block() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 7)), torch.randn(3, 5, 6)


def convolution_block() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv1d(6, 24, 1), nn.Tanh(), nn.Conv1d(24, 7, 1)), torch.randn(3, 6, 5)


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize("block", [linear_block, convolution_block])
@pytest.mark.parametrize("stops", [True, False])
def test_the_last_layer_of_a_checkpoint_is_not_computed_again(block, stops):
    operators = torch.ops.aten.addmm.default, torch.ops.aten.convolution.default
    torch.manual_seed(0)
    block, x = block()
    model, found = Model(block), []
    for attached in (False, True):
        with set_checkpoint_early_stop(stops), Calls(*operators) as calls:
            if attached:
                with FlashEngine(model, max_grad_norm=0.1):
                    loss = model(x).square().mean()
                    calls.outputs.clear()
                    loss.backward()
            else:
                loss = model(x).square().mean()
                calls.outputs.clear()
                loss.backward()
        found.append(calls.outputs)
    assert found[0] == found[1] == ([24] if stops else [24, 7])


def test_hooks_that_are_no_checkpoints_see_what_taps_save():
    """As `save_on_cpu` and others do."""
    seen = []
    layer = nn.Linear(6, 24)
    with (
        FlashEngine(layer, max_grad_norm=0.1) as engine,
        torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x),
    ):
        layer(torch.randn(3, 5, 6)).sum().backward()
        engine.finish()
    assert torch.Size([3, 5, 6]) in seen


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear_block()[0], nn.Sequential(nn.Tanh(), nn.Linear(7, 24), nn.Linear(24, 1))

    def forward(self, x):
        between = checkpoint(self.first, x, use_reentrant=False)
        self.between = weakref.ref(between.untyped_storage())
        return checkpoint(self.last, between, use_reentrant=False)


@pytest.mark.parametrize("attached", [False, True])
def test_the_input_of_a_checkpoint_is_freed_by_backward_while_the_loss_lives(attached):
    model = TwoBlocks()
    with FlashEngine(model, max_grad_norm=0.1) if attached else nullcontext():
        loss = model(linear_block()[1]).square().mean()
        assert model.between() is not None
        loss.backward()
        assert model.between() is None


def test_a_second_backward_pass_needs_a_graph_that_was_retained():
    model = Model(linear_block()[0])
    x = linear_block()[1].requires_grad_()
    with FlashEngine(model, max_grad_norm=0.1):
        loss = model(x).square().mean()
        first, second = (torch.autograd.grad(loss, x, retain_graph=keep)[0] for keep in (True, False))
        assert torch.equal(first, second)
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            torch.autograd.grad(loss, x)

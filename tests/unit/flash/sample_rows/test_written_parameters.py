"""Parameters that forward writes: what it makes of parameters alone is exact, what it makes of samples is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, assert_next_step_is_exact, private_step, reference
from tests.unit.flash.sample_rows.verified_models import losses, rows


class Writing(nn.Module):
    """Writes something before or after its layers run."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("table", torch.zeros(6))
        self.before, self.after = before, after

    def forward(self, x):
        if self.before:
            self.before(self, x)
        y = self.last(self.first(x).tanh() * self.scale)
        if self.after:
            self.after(self, x)
        return y


@torch.no_grad()
def copied(model, x):
    model.scale.copy_(0.9 * model.scale)


@torch.no_grad()
def clipped(model, x):
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


@torch.no_grad()
def in_one_call(model, x):
    torch._foreach_mul_(list(model.parameters()), 0.9)


def through_data(model, x):
    model.first.weight.data.mul_(0.9)


def of_data(model, x):
    model.first.weight.data = 0.9 * model.first.weight.data


@pytest.mark.parametrize("write", [copied, clipped, in_one_call, through_data, of_data])
def test_what_forward_makes_of_parameters_alone_is_written_once_a_step(write):
    model = Writing(before=write)
    plain = copy.deepcopy(model)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in (4, 5):
            batch = rows(size)
            write(plain, None)  # as it is when the layers run
            unwritten = copy.deepcopy(plain)
            unwritten.before = None
            truth, engine.max_grad_norm = reference(unwritten, batch, losses)
            engine.zero_grad()
            private_step(engine, batch, losses)
            with engine.without_taps():
                assert_agrees(copied_gradients(unwritten, model), batch, losses, engine, truth, engine.max_grad_norm)
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.data, other.data, rtol=0, atol=0)


def copied_gradients(model, other):
    for mine, found in zip(model.parameters(), other.parameters(), strict=True):
        mine.grad = found.grad
    return model


class WritingBlocks(nn.Module):
    """Checkpointed blocks that write their own weights in forward."""

    def __init__(self, write):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Writing(before=write) for _ in range(2)), nn.Linear(6, 2)
        for block in self.blocks:
            block.last = nn.Linear(6, 6)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def test_recomputed_blocks_may_write_what_their_weights_hold_already():
    model = WritingBlocks(clipped).double()
    with FlashEngine(model, max_grad_norm=1.0, memory_budget="lean") as engine:
        for size in (4, 5, 4):
            assert_next_step_is_exact(engine, {"x": rows(size)["x"].double()}, losses)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)  # beyond the bounds again
        assert "recomputed" in str(engine.explain())


def test_recomputed_blocks_that_change_their_weights_each_time_are_refused():
    """The step would change them once more than ordinary training does."""
    with (
        FlashEngine(WritingBlocks(copied), max_grad_norm=1.0, memory_budget="lean") as engine,
        pytest.raises(UserError, match="was changed between backward and the optimizer step"),
    ):
        private_step(engine, rows(), losses)


class Iterates(nn.Module):
    """Takes a step of a power iteration, through .data, and divides a weight that it uses by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("u", torch.randn(6))

    def forward(self, x):
        weight = self.first.weight
        v = nn.functional.normalize(weight.detach().T @ self.u, dim=0)
        self.u.data.copy_(nn.functional.normalize(weight.detach() @ v, dim=0))
        return self.last(nn.functional.linear(x, weight / (self.u @ weight @ v)))


def test_what_is_written_is_put_back_though_a_weight_turns_out_to_be_used_by_hand():
    model, batch = Iterates(), rows()
    plain = copy.deepcopy(model)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, losses)
    plain(batch["x"])
    torch.testing.assert_close(model.u, plain.u)


def average_into_parameter(model, x):
    model.scale.data.lerp_(x.mean(0), 0.1)


def average_into_buffer(model, x):
    model.table.data.mul_(0.9).add_(x.mean(0))


@pytest.mark.parametrize(
    ("write", "what"), [(average_into_parameter, "scale is a parameter"), (average_into_buffer, "table is a buffer")]
)
def test_what_forward_makes_of_samples_is_refused(write, what):
    """It would leave training without noise; a write through .data changes no version."""
    model = Writing(after=write)
    with FlashEngine(model, max_grad_norm=1.0) as engine, pytest.raises(UserError, match=f"^{what} that forward comp"):
        private_step(engine, rows(), losses)

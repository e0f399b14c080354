"""What verification leaves as it was, and when a forward is verified again."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.torch_side.instance_method import instance_method
from tests.unit.flash.agreement import assert_agrees, assert_exact, private_step, reference
from tests.unit.flash.sample_models import B, D, T


class Stateful(nn.Module):
    """Random numbers of three kinds, a buffer, a counter, an input changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(D, D), 0
        self.register_buffer("count", torch.zeros(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        x += 1
        return self.drop(self.layer(x)) * random.random() * float(np.random.rand())


def test_random_numbers_buffers_attributes_and_inputs_are_as_without_verification():
    answers = []
    for private in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model, x = Stateful(), torch.zeros(B, D)
        if private:
            with FlashEngine(model, max_grad_norm=1.0):
                answers.append(model(x).detach())
        else:
            answers.append(model(x).detach())
        assert model.calls == 1
        assert model.count == 1
        assert (x == 1).all()
    torch.testing.assert_close(*answers)


def test_a_forward_is_verified_once_for_each_way_it_is_called():
    calls = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 3)

        def forward(self, x, *, twice=False):
            calls.append(x.shape[0])
            return self.layer(x) * (2 if twice else 1)

    model = Counting()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(4, D))
        model(torch.randn(1, D))
        engine.verification.schedule.pause()
        assert len(calls) > 2
        calls.clear()
        for batch in (4, 7, 1, 0, 3):
            model(torch.randn(batch, D))
        assert calls == [4, 7, 1, 0, 3]
        calls.clear()
        model(torch.randn(4, D), twice=True)
        assert len(calls) > 1


class Branching(nn.Module):
    """A branch that the first batches do not take."""

    def __init__(self, *, bad: bool) -> None:
        super().__init__()
        self.layer, self.rare, self.step, self.bad = nn.Linear(D, D), nn.Linear(D, D), 0, bad

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        x = self.layer(x)
        if self.step < 3:
            return x
        return self.rare(x.transpose(0, 1)).transpose(0, 1) if self.bad else self.rare(x)


@pytest.mark.parametrize("bad", [False, True])
def test_a_layer_first_reached_later_is_verified_then(bad):
    model = Branching(bad=bad)
    with FlashEngine(model, max_grad_norm=1.0):
        model(torch.randn(B, T, D))
        model(torch.randn(B, T, D))
        model(torch.randn(B, T, D))
        assert bad or 3 in engine_tap(model.rare).known


def engine_tap(module):
    return instance_method(module)


def test_a_mask_that_all_samples_share_may_have_as_many_rows_as_there_are_samples():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x, mask):
            return self.layer((x @ x.transpose(1, 2) + mask).softmax(-1) @ x)

    mask = torch.full((T, T), -torch.inf).triu(1)
    assert_exact(Masked(), {"x": torch.randn(B, T, D)}, lambda m, b: m(b["x"], mask).sin().flatten(1).sum(1))


def test_a_batch_in_another_dimension_of_the_argument_is_said_with_batch_size_of():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 3)

        def forward(self, x):
            return self.layer(x.transpose(0, 1))

    model, x = Turned(), torch.randn(B, 5, D)
    losses = lambda m, b: m(b["x"].transpose(0, 1)).sin().flatten(1).sum(1)  # noqa: E731
    truth, c = reference(model, {"x": x}, losses)
    with FlashEngine(model, max_grad_norm=c) as engine, pytest.raises(UserError, match=r"^layer"):
        private_step(engine, {"x": x}, losses)
    with FlashEngine(model, max_grad_norm=c, batch_size_of=lambda args, kwargs: args[0].shape[1]) as engine:
        private_step(engine, {"x": x}, losses)
    assert_agrees(model, {"x": x}, losses, engine, truth, c)


def test_a_packed_sequence_has_as_many_samples_as_sequences():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 3, bias=False)  # padding gives nothing: other lengths change no sample

        def forward(self, packed):
            return self.layer(pad_packed_sequence(packed, batch_first=True)[0]).sum(1)

    x, lengths = torch.randn(B, 5, D), torch.tensor([2, 5, 1, 4])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    model = Packed()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(packed).sin().sum().backward()
        engine.finish()
        assert engine.samples == B

"""Workloads as users write them: what the tests of --workload point at. Some are wrong on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import dpscope


class CalledTwice(nn.Module):
    """One Linear used twice, and a parameter that no layer owns."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.inner(x))) * self.gain)


class Twice(nn.Module):
    """A module called twice, and nothing else that is odd."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.inner(x))))


class Scale(nn.Module):
    """A custom module with a bare parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.gain


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def _workload(model, batch_size, width=8):
    def batch(seed, device):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch_size, width, generator=generator)
        return x.to(device), torch.randint(3, (batch_size,), generator=generator).to(device)

    return dpscope.Workload(model=model, batch=batch, loss=loss)


def called_twice(batch_size):
    return _workload(Twice, batch_size)


def bare_parameter(batch_size):
    return _workload(lambda: nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 3)), batch_size)


def twice_and_bare(batch_size):
    return _workload(CalledTwice, batch_size)


def with_lengths(batch_size, seq_len):
    return _workload(lambda: nn.Linear(seq_len, 3), batch_size, width=seq_len)


def batch_of_three():
    return _workload(Twice, 3)


def batch_norm(batch_size):
    return _workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), batch_size)


def not_for_meta(batch_size):
    """A model that reads its own weights while it is built."""

    def model():
        layer = nn.Linear(8, 3)
        assert float(layer.weight.detach().abs().sum()) > 0
        return layer

    return _workload(model, batch_size)


# -- wrong on purpose ------------------------------------------------------------------------------------------------


def returns_a_number():
    return 3


def returns_nothing():
    pass


def gives_a_model(batch_size):
    return dpscope.Workload(model=Twice(), batch=lambda seed, device: None, loss=loss)


def gives_tensors(batch_size):
    return dpscope.Workload(model=Twice, batch=(torch.zeros(2, 8), torch.zeros(2)), loss=loss)


def batch_without_arguments(batch_size):
    return dpscope.Workload(model=Twice, batch=lambda: None, loss=loss)


def asks_for_more(batch_size, colour):
    return _workload(Twice, batch_size)


def raises(batch_size):
    return _divide(batch_size, 0)


def _divide(a, b):
    return a / b


def exits(batch_size):
    raise SystemExit("usage: own_workloads.py FILE")


def loss_that_fails(batch_size):
    return dpscope.Workload(model=Twice, batch=_workload(Twice, batch_size).batch, loss=_wrong_shapes)


def _wrong_shapes(model, batch):
    return loss(model, (batch[0][:, :3], batch[1]))


def scalar_loss(batch_size):
    return dpscope.Workload(
        model=Twice,
        batch=_workload(Twice, batch_size).batch,
        loss=lambda model, batch: loss(model, batch).mean(),
    )


NOT_A_FUNCTION = 3

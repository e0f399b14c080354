"""Samples of different lengths in one tensor: packed sequences are exact, rows with lengths beside them are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_exact, private_step


class Packed(nn.Module):
    """Layers see the packed data, in which rows are positions of all samples."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.GRU(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        h = PackedSequence(self.first(x.data).tanh(), x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return self.last(self.inner(h)[1][-1])


def of_packed(model, batch):
    rows = [row[: int(length)] for row, length in zip(batch["x"], batch["lengths"], strict=True)]
    return model(pack_sequence(rows, enforce_sorted=False)).sin().mean(1)


def test_layers_on_packed_data_are_exact():
    for lengths in ([3, 5, 1, 4], [2, 2]):
        model = Packed()
        batch = {"x": torch.randn(len(lengths), 5, 6), "lengths": torch.tensor(lengths)}
        engine = assert_exact(model, batch, of_packed)
        assert engine.samples == len(lengths)


class WithLengths(nn.Module):
    """Takes the positions of all samples in one list, and how many each sample has."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 2), nn.Parameter(torch.ones(6))

    def forward(self, x, lengths):
        rows = (self.first(x).tanh() * self.scale).split(lengths.tolist())
        return self.last(torch.stack([row.mean(0) for row in rows]))


def test_rows_of_positions_with_lengths_beside_them_are_refused_as_such():
    lengths = torch.tensor([3, 5, 1])
    with (
        FlashEngine(WithLengths(), max_grad_norm=1.0) as engine,
        pytest.raises(UserError, match="the first dimension"),
    ):
        private_step(engine, {"x": torch.randn(9, 6)}, lambda model, batch: model(batch["x"], lengths).sum(1))


def test_a_mistake_of_the_users_stays_torchs_own_error():
    with FlashEngine(WithLengths(), max_grad_norm=1.0) as engine, pytest.raises(RuntimeError, match="split_sizes"):
        private_step(engine, {"x": torch.randn(9, 6)}, lambda m, b: m(b["x"], torch.tensor([3, 5])).sum(1))

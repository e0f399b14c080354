"""Recurrent layers and attention, torch's and Opacus's, the batch first or second: their samples are known."""

import itertools

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_exact

D = 4
RECURRENT = (nn.RNN, nn.GRU, nn.LSTM, DPRNN, DPGRU, DPLSTM)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def losses(model, batch):
    return model(batch["x"]).sin().flatten(1).sum(1)


class Recurrent(nn.Module):
    """Batch first outside, and inside as the layer wants it; outputs and last states are used, a state may be given."""

    def __init__(self, layer: nn.Module, *, given: bool = False) -> None:
        super().__init__()
        self.entry, self.layer, self.given = nn.Linear(D, D), layer, given

    def forward(self, x):
        x = self.entry(x)
        states = ()
        if self.given:
            directions = (2 if self.layer.bidirectional else 1) * self.layer.num_layers
            state = x.mean(1).repeat(directions, 1, 1)
            states = ((state, state.tanh()) if "LSTM" in type(self.layer).__name__ else state,)
        y, state = self.layer(x if self.layer.batch_first else x.transpose(0, 1), *states)
        y = y if self.layer.batch_first else y.transpose(0, 1)
        last = torch.cat(state) if isinstance(state, tuple) else state
        return torch.cat([y.flatten(1), last.transpose(0, 1).flatten(1)], 1)


@pytest.mark.parametrize("cls", RECURRENT)
@pytest.mark.parametrize("batch", [1, 3])
def test_recurrent_layers_are_exact(cls, batch):
    for layers, bidirectional, batch_first, given in itertools.product((1, 2), (False, True), (False, True), (0, 1)):
        layer = cls(D, D, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first)
        # As many steps as samples, and fewer: each with every three of the options.
        length = (batch, 2)[(layers + bidirectional + batch_first + given) % 2]
        assert_exact(Recurrent(layer, given=bool(given)), {"x": torch.randn(batch, length, D)}, losses)


class PackedModel(nn.Module):
    """Sequences of lengths of their own, packed inside the model; their order and the last states are used."""

    def __init__(self, layer: nn.Module, *, given: bool) -> None:
        super().__init__()
        self.entry, self.layer, self.head, self.given = nn.Linear(D, D), layer, nn.Linear(2 * D, 3), given

    def forward(self, x, lengths):
        first = self.layer.batch_first
        x = self.entry(x)
        packed = pack_padded_sequence(x if first else x.transpose(0, 1), lengths, first, enforce_sorted=False)
        state = x.mean(1).unsqueeze(0)
        states = ((state, state.tanh()) if "LSTM" in type(self.layer).__name__ else state,) if self.given else ()
        packed, state = self.layer(packed, *states)
        y, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        last = state[-1] if isinstance(state, tuple) else state
        return self.head(torch.cat([y.sum(1), last[0]], 1))


@pytest.mark.parametrize("cls", RECURRENT)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequences_are_exact(cls, given, batch_first):
    batch = {"x": torch.randn(4, 5, D), "lengths": torch.tensor([2, 5, 1, 2])}
    model = PackedModel(cls(D, D, batch_first=batch_first), given=given)
    assert_exact(model, batch, lambda m, b: m(b["x"], b["lengths"]).sin().sum(1))


def test_a_packed_sequence_of_a_bidirectional_layer_of_two_is_exact():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(D, D, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x, lengths):
            packed, (h, c) = self.layer(pack_padded_sequence(x, lengths, True, enforce_sorted=False))
            return torch.cat([pad_packed_sequence(packed, True)[0].sum(1), h.sum(0), c.sum(0)], 1)

    batch = {"x": torch.randn(3, 4, D), "lengths": torch.tensor([2, 4, 3])}
    assert_exact(Deep(), batch, lambda m, b: m(b["x"], b["lengths"]).sin().sum(1))


class Attention(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.entry, self.layer = nn.Linear(D, D), layer

    def forward(self, x):
        x = self.entry(x)
        if self.layer.batch_first:
            return self.layer(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return self.layer(x, x, x, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("cls", [nn.MultiheadAttention, DPMultiheadAttention])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize("length", [3, 4])
def test_attention_is_exact_whichever_dimension_it_has_its_samples_in(cls, options, length):
    assert_exact(Attention(cls(D, 2, **options)), {"x": torch.randn(3, length, D)}, losses)


@pytest.mark.parametrize("cls", [nn.LSTM, DPLSTM, nn.MultiheadAttention, DPMultiheadAttention])
@pytest.mark.parametrize("length", [3, 4])
def test_a_layer_whose_batch_first_was_forgotten_is_refused_by_name(cls, length):
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry, self.layer = nn.Linear(D, D), cls(D, D) if "LSTM" in cls.__name__ else cls(D, 2)

        def forward(self, x):
            x = self.entry(x)
            return self.layer(x)[0] if "LSTM" in cls.__name__ else self.layer(x, x, x)[0]

    model = Forgotten()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="batch"):
        model(torch.randn(3, length, D))

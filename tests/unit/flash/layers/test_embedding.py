"""Embedding: repeated ids, padding, positions shared by all samples, and the head that is tied to it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import CLIPPING, PATHS, REDUCTIONS, assert_exact
from tests.unit.flash.flash_models import Decoder, token_batch, token_losses


class Bag(nn.Module):
    def __init__(self, rows: int, width: int, padding: int | None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width, padding_idx=padding), nn.Linear(width, 3)

    def forward(self, ids):
        return self.head(self.table(ids).tanh().flatten(1, -2).sum(1))


def bag_losses(model, batch):
    return model(batch["ids"]).sin().sum(1)


@pytest.mark.parametrize("clipping", CLIPPING)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    rows=st.integers(1, 6),
    width=st.integers(1, 5),
    padding=st.booleans(),
    path=st.sampled_from(PATHS),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_that_repeat_add_up_before_they_are_squared(
    clipping, batch, shape, rows, width, padding, path, reduction, dtype
):
    model = Bag(rows, width, 0 if padding else None).to(dtype)
    batch = {"ids": torch.randint(0, rows, (batch, *shape))}
    assert_exact(model, batch, bag_losses, clipping=clipping, loss_reduction=reduction, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_tied_head_counts_its_cross_terms(path, dtype, batch):
    model = Decoder(tied=True, layers=1).to(dtype)
    assert model.head.weight is model.tokens.weight
    assert_exact(model, token_batch(batch, 6), token_losses, path=path)


def test_the_cross_term_of_a_tied_head_matters():
    """Guards the test above: leaving the cross term out would be far outside its tolerance."""
    model = Decoder(tied=True, layers=1).double()
    batch = token_batch(4, 6)
    engine = assert_exact(model, batch, token_losses)
    free = Decoder(layers=1).double()
    free.load_state_dict({**model.state_dict(), "head.weight": model.tokens.weight.detach()})
    untied = assert_exact(free, batch, token_losses)
    assert ((engine.norms - untied.norms).abs() / engine.norms).max() > 1e-3


def test_one_id_a_sample_given_by_the_caller_is_a_batch():
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, x, label):
            return self.mix(x) + self.table(label)

    batch = {"x": torch.randn(4, 4), "label": torch.tensor([0, 3, 3, 1])}
    assert_exact(Labelled(), batch, lambda model, batch: model(batch["x"], batch["label"]).sin().sum(1))


@pytest.mark.parametrize("length", [3, 5])
def test_positions_without_a_batch_dimension_are_exact_even_where_they_number_as_many_as_samples(length):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(5, 4), nn.Embedding(8, 4)

        def forward(self, ids):
            return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))

    assert_exact(Positions(), {"x": torch.randint(0, 5, (3, length))}, lambda m, b: m(b["x"]).sin().mean((1, 2)))


@pytest.mark.parametrize("option", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_options_without_a_per_sample_meaning_are_refused_by_name(option):
    model = nn.Sequential(nn.Embedding(5, 4, **option))
    with pytest.raises(UserError, match=rf"^0 .*{next(iter(option))}"):
        FlashEngine(model, max_grad_norm=1.0)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize(("option", "value"), [("scale_grad_by_freq", True), ("sparse", True), ("max_norm", 1.0)])
def test_an_option_that_is_set_later_is_refused_though_no_id_repeats_in_that_step(option, value):
    model = nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 3))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.arange(8).view(8, 1)).sum().backward()
        engine.finish()
        setattr(model[0], option, value)
        with pytest.raises(UserError, match=option):
            model(torch.arange(8).view(8, 1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("mode", "weighs"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
@pytest.mark.parametrize("offsets", [False, True])
def test_bags_are_exact(mode, weighs, offsets):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(9, 6, mode=mode, padding_idx=1), nn.Linear(6, 3)

        def forward(self, ids):
            weights = ids.to(self.head.weight.dtype).cos() if weighs else None
            if offsets:
                starts = torch.arange(len(ids)) * ids.shape[1]
                flat = None if weights is None else weights.flatten()
                return self.head(self.bag(ids.flatten(), starts, per_sample_weights=flat))
            return self.head(self.bag(ids, per_sample_weights=weights))

    assert_exact(Bags(), {"ids": torch.randint(0, 9, (4, 5))}, lambda m, b: m(b["ids"]).sin().sum(1))

"""A padded batch's tensors know which rows are samples, through whatever cannot move a row and nothing else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, pad_batch, real_rows, same_rows
from dpscope.flash.padding.rows import PaddedTensor, rows_in
from tests.torch_here import takes_compiled


def _written(x):
    x = x.clone()
    x[:] = x.flip(0)
    return x


def _filled(x, mask):
    x = x.clone()
    x[mask] = 0.0
    return x


def _given_data(x):
    x = x.clone()
    x.data = x.flip(0)
    return x


KEEPS = {
    "to a dtype": lambda x: x.to(torch.float64),
    "to a device": lambda x: x.to("cpu", non_blocking=True, copy=True),
    "a cast": lambda x: x.half().float(),
    "a copy": lambda x: x.clone().detach().contiguous(),
    "scaling": lambda x: (x / 255 - 0.5) * 2,
    "scaling from the left": lambda x: 1 - 2 * x,
    "noise of the same rows": lambda x: 0.5 * x + 0.1 * torch.randn_like(x),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "statistics by channel": lambda x: torch.div(torch.sub(x, torch.ones(4)), torch.ones(1, 4)),
    "columns": lambda x: x[:, :-1],
    "columns by ellipsis": lambda x: x[..., 1:],
    "one column": lambda x: x[:, 0],
    "a dimension more": lambda x: x.unsqueeze(1)[:, None],
    "flattening": lambda x: x.unsqueeze(1).flatten(1),
    "a view": lambda x: x.view(len(x), 2, 2).reshape(x.size(0), -1),
    "other dimensions swapped": lambda x: x.view(-1, 2, 2).transpose(1, 2).permute(0, 2, 1),
    "columns joined": lambda x: torch.cat([x, torch.ones_like(x[:, :1])], dim=1),
    "columns cut apart": lambda x: x.chunk(2, dim=-1)[1],
    "a mirror image": lambda x: x.flip(-1),
    "a margin": lambda x: F.pad(x, (1, 1)),
    "another resolution": lambda x: F.interpolate(x.view(6, 1, 2, 2), scale_factor=2),
    "a mask filled in": lambda x: x.masked_fill(x > 0, 0.0),
    "a mask written into": lambda x: _filled(x, x > 0),
    "a choice": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "one row for all": lambda x: x + torch.ones(1, 4) * torch.ones(()),
    "as many columns as rows": lambda x: torch.cat([x, x[:, :2]], 1) + torch.ones(6),
    "pickling": lambda x: pickle.loads(pickle.dumps(x)),
    "deep copying": copy.deepcopy,
}
LOSES = {
    "a permutation": lambda x: x[torch.randperm(len(x))],
    "a flip": lambda x: x.flip(0),
    "rows left out": lambda x: x[1:],
    "a row repeated": lambda x: x[[0] * len(x)],
    "parts of the rows": lambda x: x.chunk(2)[0],
    "a flip of rows and columns": lambda x: x.flip(0, 1),
    "a flip by list": lambda x: torch.flip(x, dims=[-2]),
    "rows joined": lambda x: torch.cat([x[:, :2].reshape(-1, 4), x[:, 2:].reshape(-1, 4)]),
    "rows joined by number": lambda x: torch.cat((x, x), -2)[:, :],
    "a margin of rows": lambda x: F.pad(x, (0, 0, 1, -1)),
    "other data": _given_data,
    "rolling": lambda x: x.roll(1, 0),
    "sorting": lambda x: x.sort(0).values,
    "batches joined": lambda x: torch.cat([x[:3], x[3:]]),
    "the transpose": lambda x: x.t(),
    "a square matrix of rows": lambda x: x[:, :1] + x[:, 0],
    "a product": lambda x: x @ torch.eye(4),
    "rows folded": lambda x: x.view(-1),
    "masked rows": lambda x: x[torch.ones(len(x), dtype=torch.bool)],
    "indices apart": lambda x: x.view(6, 2, 1, 2)[:, torch.arange(6) % 2, :, torch.arange(6) % 2],
    "its own rows moved, added": lambda x: x * 0 + x.flip(0),
    "its own rows moved, from the left": lambda x: x.flip(0) + x * 0,
    "its own rows moved, in place": lambda x: x.clone().mul_(0).add_(x.roll(1, 0)),
    "its own rows moved, joined": lambda x: torch.cat([x, x.flip(0)], dim=1)[:, 4:],
    "its own rows moved, chosen": lambda x: torch.where(x > 9, x, x.flip(0)),
    "its own rows moved, between": lambda x: torch.lerp(x, x.flip(0), 1.0),
    "its own rows moved, a mask": lambda x: x.masked_fill(x.flip(0) > 0, 0.0),
    "its own rows moved, a mask written into": lambda x: _filled(x, x.flip(0) > 0),
    "its own rows moved, a bound": lambda x: x.clamp(min=x.flip(0)),
    "another batch added": lambda x: x + pad_batch(torch.randn(3, 4), 6),
    "overwritten": lambda x: x.clone().copy_(x.flip(0)),
    "rows written into": _written,
}


@pytest.fixture
def x():
    return pad_batch(torch.randn(4, 4), 6)


@pytest.mark.parametrize("name", KEEPS)
def test_what_cannot_move_rows_keeps_them(x, name):
    made = KEEPS[name](x)
    assert real_rows(made) == 4 and len(made) == 6
    assert rows_in(made) == rows_in(x)


@pytest.mark.parametrize("name", LOSES)
def test_what_may_move_rows_loses_them(x, name):
    assert rows_in(LOSES[name](x)) is None


def test_a_tensor_that_is_overwritten_no_longer_knows(x):
    x.copy_(x.flip(0))
    assert rows_in(x) is None


def test_a_write_through_another_name_is_noticed(x):
    view, plain = x.flatten(1), x.view(-1)
    assert real_rows(view) == 4
    plain.copy_(plain.flip(0))
    assert rows_in(x) is None and rows_in(view) is None


def test_a_tensor_that_is_read_only_stays_what_it_was(x):
    torch.zeros(6, 4).copy_(x)
    torch.zeros(6, 4).add_(x)
    x.requires_grad = True
    x.sum().backward()
    x.grad = None
    assert real_rows(x) == 4


@takes_compiled
def test_compiled_functions_take_padded_tensors_without_compiling_for_each(x):
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph

    loss = torch.compile(lambda a, b: (a - b[:, None].float()).square().mean(1), backend=backend, fullgraph=True)
    for real in (2, 3, 4):
        a, b = pad_batch((torch.randn(real, 4), torch.arange(real)), 6)
        torch.testing.assert_close(loss(a, b), (a - b[:, None].float()).square().mean(1))
    assert count == 1


def test_labels_may_be_masked_in_place():
    y = pad_batch(torch.tensor([3, 0, 2]), 5)
    y[y == 0] = -100
    assert real_rows(y) == 3 and y.tolist() == [3, -100, 2, 3, 3]
    assert real_rows(F.one_hot(y.clamp(min=0), 4)) == 3


def test_results_of_a_model_and_of_a_loss_are_plain_tensors(x):
    loss = F.cross_entropy(nn.Linear(4, 3)(x), pad_batch(torch.tensor([0, 1, 2, 0]), 6))
    assert type(loss) is torch.Tensor
    loss.backward()


@dataclass
class Example:
    ids: torch.Tensor
    words: list


def test_any_structure_is_padded():
    class Encoding(dict):
        pass

    batch = (
        Encoding(ids=torch.arange(6).view(3, 2), nested=[{"mask": torch.ones(3, dtype=torch.bool)}]),
        Example(torch.arange(3), ["a", "b"]),
        torch.tensor(0.5),
        torch.ones(7, 2),
        None,
    )
    padded = pad_batch(batch, 5)
    assert type(padded[0]) is Encoding
    assert padded[0]["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    assert padded[0]["nested"][0]["mask"].shape == (5,)
    assert padded[1].ids.tolist() == [0, 1, 2, 0, 0] and padded[1].words == ["a", "b"]
    assert padded[3].shape == (7, 2) and not isinstance(padded[3], PaddedTensor)
    assert real_rows(padded) == real_rows(padded[1].ids) == 3
    assert batch[0]["ids"].shape == (3, 2)


def test_no_samples_become_rows_of_zeros():
    x, y = pad_batch((torch.empty(0, 3), torch.empty(0, dtype=torch.long)), 2)
    assert x.tolist() == [[0.0] * 3] * 2 and y.tolist() == [0, 0] and real_rows(x) == 0


def test_more_samples_than_rows_are_refused():
    with pytest.raises(UserError, match="7 samples cannot be padded to 4"):
        pad_batch(torch.ones(7, 1), 4)


def test_tensors_of_two_batches_are_refused_together():
    with pytest.raises(UserError, match="two padded batches"):
        real_rows((pad_batch(torch.ones(2, 1), 4), pad_batch(torch.ones(3, 1), 4)))


def test_rows_can_be_vouched_for(x):
    features = same_rows(torch.relu(x @ torch.eye(4)), x)
    assert real_rows(features) == 4
    plain = torch.ones(3)
    assert same_rows(plain, torch.ones(3)) is plain


# -- what an engine makes of it ----------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def sums_of(model, x, y, **options):
    with FlashEngine(model, max_grad_norm=0.1, **options) as engine:
        F.cross_entropy(model(x), y, reduction=options.get("loss_reduction", "mean")).backward()
        sums = {
            name: total for (name, _), (_, total) in zip(model.named_parameters(), engine.clipped_sums(), strict=True)
        }
        return sums, engine


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padding_has_no_share_in_sums_norms_and_counts(model, reduction):
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    expected, plain = sums_of(model, x, y, loss_reduction=reduction)
    found, padded = sums_of(model, *pad_batch((x, y), 7), loss_reduction=reduction)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-5, atol=1e-7, msg=name)
    assert padded.norms.shape == padded.factors.shape == (4,)
    torch.testing.assert_close(padded.norms, plain.norms)
    assert padded.samples == 4 and padded.padding.share == 3 / 7
    assert "padding: 42.9% of 7 rows; batches: 1 of 7" in str(padded.explain())
    assert "padding" not in str(plain.explain())


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
def test_padding_may_hold_anything(model, value):
    x, y = pad_batch((torch.randn(4, 4), torch.tensor([0, 1, 2, 0])), 7)
    expected, _ = sums_of(model, x, y)
    x[4:] = value
    found, engine = sums_of(model, x, y)
    assert all(torch.equal(found[name], total) for name, total in expected.items())
    assert engine.nonfinite_samples == 0


def test_a_batch_of_padding_alone_sums_to_zero(model):
    found, engine = sums_of(model, *pad_batch((torch.empty(0, 4), torch.empty(0, dtype=torch.long)), 3))
    assert all((total == 0).all() for total in found.values())
    assert engine.samples == 0 and engine.state.micro_batches == 1 and len(engine.norms) == 0


def test_a_model_called_with_other_rows_than_its_batch_is_refused(model):
    x = pad_batch(torch.randn(4, 4), 6)
    sees = pytest.raises(UserError, match="3 samples, made of a padded batch of 6 rows")
    with FlashEngine(model, max_grad_norm=1.0, batch_size_of=lambda args, kwargs: 3), sees:
        model(x)


def test_layers_called_by_hand_are_refused_padded_batches(model):
    sees = pytest.raises(UserError, match="0 was called outside of the model's own forward with a padded batch")
    with FlashEngine(model, max_grad_norm=1.0, batch_size_of=lambda args, kwargs: len(args[0])), sees:
        model[0](pad_batch(torch.randn(4, 4), 6))


def test_backward_through_another_padded_batch_is_refused(model):
    one, other = pad_batch(torch.randn(4, 4), 6), pad_batch(torch.randn(5, 4), 6)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        abandoned = model(one).sum()
        kept = model(other).sum()
        with pytest.raises(UserError, match="followed by that of another padded batch"):
            (abandoned + kept).backward()
        engine.zero_grad()
        model(one)  # never run backward
        model(other).sum().backward()
        engine.finish()
        assert engine.samples == 5


def test_two_forward_passes_of_one_padded_batch_are_about_the_same_samples(model):
    x = torch.randn(4, 4)
    results = []
    for given in (x, pad_batch(x, 6)):
        with FlashEngine(model, max_grad_norm=0.1, loss_reduction="sum") as engine:
            (model(given).square().sum() + model(given * 2).sum()).backward()
            results.append([total for _, total in engine.clipped_sums()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

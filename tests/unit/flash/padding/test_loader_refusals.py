"""Padded batches that do not tell their padding, and sizes and samplers that cannot be padded, are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine, pad_batch, real_rows, same_rows
from tests.unit.flash.padding.padded_training import (
    CLASSES,
    train,
    trained,
)
from tests.unit.flash.private_training import make_data, make_model


@pytest.fixture
def padded():
    model, optimizer, _, loader = trained(pad_batches=3)
    optimizer.zero_grad()
    return model, optimizer, loader


MISUSES = {
    "rows shuffled": lambda x, y: x[torch.randperm(len(x))],
    "another batch of as many rows": lambda x, y: torch.randn(3, 8),
    "another batch of other rows": lambda x, y: torch.randn(5, 8),
    "features made outside the model": lambda x, y: torch.tanh(x) @ torch.eye(8),
    "two batches joined": lambda x, y: torch.cat([x, x]),
    "rows cut off": lambda x, y: x[:2],
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_batches_that_do_not_tell_their_padding_are_refused(padded, misuse):
    model, _, loader = padded
    x, y = next(iter(loader))
    with pytest.raises(UserError, match="do not say how many of them are padding"):
        model(MISUSES[misuse](x, y))
    with torch.no_grad():
        model(torch.randn(7, 8))
    model(same_rows(torch.tanh(x) @ torch.eye(8), x))


def test_batches_of_ones_own_may_be_padded_by_hand(padded):
    model, optimizer, _ = padded
    x, y = pad_batch((torch.randn(5, 8), torch.arange(5) % CLASSES), 7)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.engine.samples == 5


def test_parts_of_a_draw_without_a_step_between_them_are_refused(padded):
    model, optimizer, loader = padded
    batches = iter(loader)
    for _ in range(20):
        x, y = next(batches)
        if x.rows.more:
            break
        train(model, optimizer, [(x, y)])
    F.cross_entropy(model(x), y).backward()
    x, y = next(batches)
    with pytest.raises(UserError, match="cut this draw into several batches"):
        F.cross_entropy(model(x), y).backward()


def test_a_draw_whose_rest_is_left_out_takes_no_step(padded):
    model, optimizer, loader = padded
    batches = list(loader)
    first = next(at for at, (x, _) in enumerate(batches) if x.rows.more)
    draw = batches[first][0].rows.draw
    other = next(batch for batch in batches if batch[0].rows.draw > draw and not batch[0].rows.more)
    optimizer.noise_multiplier = 0.0
    start = [p.detach().clone() for p in model.parameters()]

    def moved_by(*steps):
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        train(model, optimizer, steps)
        optimizer.zero_grad()
        return torch.cat([(p - value).flatten() for p, value in zip(model.parameters(), start, strict=True)]).detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = moved_by(other)
    assert moved_by(batches[first]).count_nonzero() == 0
    with pytest.warns(UserWarning, match="the rest left out"):
        after_a_part = moved_by(other)
    torch.testing.assert_close(after_a_part, alone)


@pytest.mark.parametrize("pad_batches", [0, -3, [], "64", 1.5])
def test_what_is_no_size_is_refused(pad_batches):
    with pytest.raises(UserError, match="pad_batches="):
        trained(pad_batches=pad_batches)


def test_a_collate_function_without_rows_is_refused():
    with pytest.raises(UserError, match="no tensor that it returns has one row for each sample"):
        trained(pad_batches=5, collate_fn=lambda samples: (torch.zeros(1, 3), torch.zeros(1)))
    with pytest.raises(UserError, match="a number of tensors that depends on the number of samples"):
        trained(pad_batches=5, collate_fn=lambda samples: [sample[0] for sample in samples])


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (lambda x, y: (x, y, x), "it returned 3 tensors, and for the first sample 2"),
        (lambda x, y: (x, y[:1]), r"it made tensors of \[1, \d+\] rows"),
        (lambda x, y: (torch.cat([x, x]), torch.cat([y, y])), r"samples it made tensors of \[\d+\] rows"),
    ],
)
def test_a_collate_function_that_is_another_for_some_batches_is_refused(changed, what):
    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return changed(x, y) if len(x) > 3 else (x, y)

    with pytest.raises(UserError, match=what):
        trained(pad_batches=64, collate_fn=collate)


def test_a_batch_sampler_of_ones_own_needs_sizes():
    model = make_model()
    data = make_data()
    sampler = [[0, 1, 2], [3, 4]]
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    for pad_batches, refused in ((True, True), ([3], False)):
        arguments = {
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data_loader": DataLoader(data, batch_sampler=sampler),
            **options,
        }
        if refused:
            with pytest.raises(UserError, match=r"give the sizes, pad_batches=\[64, 128\]"):
                PrivacyEngine().make_private(**arguments, pad_batches=pad_batches)
        else:
            _, _, loader = PrivacyEngine().make_private(**arguments, pad_batches=pad_batches)
            assert [real_rows(x) for x, _ in loader] == [3, 2]


def test_opacus_engines_cannot_train_padded_batches():
    with pytest.warns(UserWarning, match="Opacus's engine"), pytest.raises(UserError, match="needs flash clipping"):
        trained(pad_batches=True, grad_sample_mode="functorch")

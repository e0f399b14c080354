"""Draws as lists of physical batches: nothing lost, and the same again for a resumed run."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.transformers.draws import collate_rows, loader_of_draws
from tests.unit.transformers.small_training import LOGICAL, PHYSICAL, SAMPLES, Counting, collate, small_llama


def draws(seed: int | None = 1, pad_batches: bool | int = False, batch_size: int = LOGICAL):
    model = small_llama()
    ordinary = DataLoader(Counting(), batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
    _, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=ordinary,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        pad_batches=pad_batches,
    )
    return loader_of_draws(loader, size=PHYSICAL, seed=seed)


@pytest.mark.parametrize("pad_batches", [False, PHYSICAL])
def test_a_draw_is_cut_into_batches_that_fit(pad_batches):
    loader = draws(pad_batches=pad_batches)
    sizes = [[len(batch["labels"]) for batch in draw] for draw in loader]
    assert len(sizes) == len(loader) == 3
    if pad_batches:
        assert {size for draw in sizes for size in draw} == {PHYSICAL}
    else:
        assert all(size == PHYSICAL for draw in sizes for size in draw[:-1])
        assert all(0 < draw[-1] <= PHYSICAL for draw in sizes)


def test_samples_are_drawn_independently_with_the_sample_rate():
    """400 draws at 1/3 of 48 samples: mean 16, deviation 3.27; the mean's own is 0.16."""
    loader = draws()
    sampler = loader.batch_sampler
    counts = torch.zeros(SAMPLES)
    sizes = []
    for epoch in range(134):
        loader.set_epoch(epoch)
        for parts in sampler:
            drawn = [index for part in parts for index in part]
            assert len(set(drawn)) == len(drawn)
            counts[drawn] += 1
            sizes.append(float(len(drawn)))
    mean, deviation = torch.tensor(sizes).mean(), torch.tensor(sizes).std()
    assert abs(mean - SAMPLES / 3) < 5 * 3.27 / len(sizes) ** 0.5
    assert 2.7 < deviation < 3.9
    rate = counts / len(sizes)
    assert (rate - 1 / 3).abs().max() < 5 * (1 / 3 * 2 / 3 / len(sizes)) ** 0.5


def test_epochs_differ_and_a_seed_gives_the_same_draws_again():
    loader, again = draws(seed=4), draws(seed=4)
    first = list(loader.batch_sampler)
    loader.set_epoch(1)
    assert list(loader.batch_sampler) != first
    assert list(again.batch_sampler) == first
    assert list(islice(again.batch_sampler, 1, None)) == first[1:]
    assert list(draws(seed=None).batch_sampler) != list(draws(seed=None).batch_sampler)


def test_an_empty_draw_has_no_batches():
    loader = draws(batch_size=1, seed=1)
    drawn = [list(draw) for draw in loader]
    assert [] in drawn


def test_samples_that_share_a_row_are_refused():
    samples = [{"input_ids": row.tolist()} for row in Counting(4).rows]
    with pytest.raises(UserError, match="the data collator makes 1 rows of 4 samples"):
        collate_rows(DataCollatorWithFlattening(), samples)

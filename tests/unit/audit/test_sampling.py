"""Poisson loaders are left alone; others are found and named, by the indices that they draw."""

from __future__ import annotations

import opacus
import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import dpscope
from dpscope.audit.noise import find_sampling_faults
from dpscope.flash import PrivacyEngine
from tests.unit.audit.engine_loops import loop_of


def data(samples):
    return TensorDataset(torch.arange(samples))


def faults(loader, rate=None):
    return list(find_sampling_faults(loader, rate))


@pytest.mark.parametrize(("samples", "rate"), [(64, 0.125), (1000, 0.01), (40, 1 / 40), (5000, 0.5)])
def test_poisson_loaders_raise_no_alarm(samples, rate):
    for seed in range(20):
        loader = DPDataLoader(data(samples), sample_rate=rate, generator=torch.Generator().manual_seed(seed))
        assert faults(loader, rate) == []


class Drawn:
    """A batch sampler of `draw()`s."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return (self.draw() for _ in range(16))


def shuffled(samples, sizes):
    """Without replacement, an epoch at a time, in batches of sizes as Poisson draws have them."""

    def epoch():
        order = torch.randperm(samples).tolist()
        while order:
            size = sizes()
            yield order[:size]
            order = order[size:]

    class Epochs:
        def __iter__(self):
            return epoch()

    return Epochs()


OTHERS = {
    "the sizes of its batches vary by": DataLoader(data(256), batch_size=16, shuffle=True),
    "vary by ±0 around 16": DataLoader(data(256), batch_sampler=BatchSampler(SequentialSampler(range(256)), 16, True)),
    "a sample is in one batch more than once": DataLoader(
        data(256), batch_sampler=BatchSampler(RandomSampler(range(256), replacement=True), 16, False)
    ),
    "where a rate of 0.0625 gives 16": DPDataLoader(data(256), sample_rate=0.125),
    "times a sample is in two batches in a row, where": DataLoader(
        data(256), batch_sampler=shuffled(256, lambda: max(1, int(torch.distributions.Binomial(256, 0.0625).sample())))
    ),
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_a_loader_that_does_not_draw_so_is_named(sentence):
    torch.manual_seed(0)
    (found,) = faults(OTHERS[sentence], 0.0625)
    assert sentence in found and "poisson_sampling=True" in found


def test_a_full_batch_at_every_step_is_poisson_sampling_at_rate_one():
    assert faults(DataLoader(data(32), batch_size=32), 1.0) == []


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook")
def test_flash_clipping_without_poisson_sampling_is_a_breach_of_accounting():
    batches = DataLoader(TensorDataset(torch.randn(8, 5, 6), torch.randint(3, (8,))), batch_size=4)
    found = dpscope.check_loop(loop_of(PrivacyEngine, poisson_sampling=False), batches)
    assert found.accounting.verdict == "BREACH"
    assert found.accounting.faults[0].startswith("poisson_sampling=False was given to make_private")
    other = dpscope.check_loop(loop_of(opacus.PrivacyEngine, poisson_sampling=False), batches)
    assert any("Opacus was not asked for Poisson sampling" in reason for reason in other.accounting.untried)

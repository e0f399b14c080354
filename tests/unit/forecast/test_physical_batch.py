"""The physical batch of a loop, on a device whose memory is counted by the test."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.forecast.physical_batch import DeviceMemory, find_physical_batch


class Counted:
    """A device on which a step of n samples takes 1000 + 10 n bytes, and that has `limit`."""

    def __init__(self, limit):
        self.limit, self.size, self.trials = limit, 0, []

    def step(self, model, batch):
        self.size = len(batch[0])
        self.trials.append(self.size)
        if 1000 + 10 * self.size > 1.5 * self.limit:  # in forward
            raise torch.OutOfMemoryError("CUDA out of memory")
        output = model(batch[0])
        output.register_hook(self.meet)
        return nn.functional.cross_entropy(output, batch[1])

    def meet(self, gradient):
        if 1000 + 10 * self.size > self.limit:  # in backward
            raise torch.OutOfMemoryError("CUDA out of memory")

    @property
    def memory(self):
        return DeviceMemory(lambda: self.limit, lambda: None, lambda: 1000 + 10 * self.size, lambda: None)


def private(count=32):
    model = nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(torch.randn(count, 3), torch.randint(2, (count,))), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    return engine, *engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )


@pytest.mark.parametrize("limit", [1200, 5000, 20_000])
def test_the_largest_batch_that_fits_is_found_with_the_margin(limit):
    engine, model, optimizer, loader = private()
    device = Counted(limit)
    before = [p.detach().clone() for p in model.parameters()]
    batch = (torch.randn(4, 3), torch.randint(2, (4,)))
    found = find_physical_batch(
        lambda b: device.step(model, b), batch, optimizer=optimizer, margin=0.05, memory=device.memory
    )
    largest = (0.95 * limit - 1000) / 10
    assert largest * 0.97 - 1 <= found <= largest
    assert len(device.trials) <= 8
    assert len(engine.accountant) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for x, y in loader:  # training goes on as if nothing had been tried
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert sum(steps for *_, steps in engine.accountant.history) == len(loader)


def test_a_card_too_small_for_one_sample_is_said_in_a_sentence():
    _, model, optimizer, _ = private()
    device = Counted(900)
    with pytest.raises(UserError, match="not even one sample fits"):
        find_physical_batch(
            lambda b: device.step(model, b),
            (torch.randn(4, 3), torch.randint(2, (4,))),
            optimizer=optimizer,
            memory=device.memory,
        )


def test_on_the_cpu_nobody_counts():
    with pytest.raises(UserError, match="counted on CUDA alone"):
        find_physical_batch(
            lambda b: b.sum(), torch.ones(2, 2), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))])
        )

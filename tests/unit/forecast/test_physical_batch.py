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


CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize("limit", [1200, 5000, 20_000])
def test_the_largest_batch_that_fits_is_found_with_the_margin(limit):
    engine, model, optimizer, loader = private()
    device = Counted(limit)
    before = [p.detach().clone() for p in model.parameters()]
    batch = (torch.randn(4, 3), torch.randint(2, (4,)))
    found = find_physical_batch(
        lambda b: device.step(model, b), batch, optimizer=optimizer, margin=0.05, memory=device.memory
    )
    gradients = 4 * (3 * 2 + 2)  # their sum is held between the passes of a step
    largest = (0.95 * limit - gradients - 1000) / 10
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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), CUBLAS], ids=["torch", "cuBLAS"])
def test_running_out_of_memory_leaves_random_numbers_and_the_next_pass_as_they_were(error):
    said = []
    _, model, optimizer, _ = private()

    def step(batch):
        torch.rand(3)  # as dropout does
        if len(batch) > 10:
            raise error
        return model(batch).square().sum(1)

    memory = DeviceMemory(lambda: 2**20, lambda: None, lambda: 2**10, lambda: None)
    state = torch.get_rng_state()
    batch = torch.zeros(4, 3)
    assert find_physical_batch(step, batch, optimizer=optimizer, most=64, memory=memory, say=said.append) == 10
    assert torch.equal(state, torch.get_rng_state())
    assert any("a batch of 11 ran out of memory" in line for line in said)
    assert said[-1].startswith("physical batch: 10. 5% of 1.0 MiB are left free")
    step(torch.randn(4, 3)).mean().backward()
    optimizer.step()


def test_an_error_that_is_not_about_memory_is_the_users():
    _, model, optimizer, _ = private()
    memory = DeviceMemory(lambda: 2**20, lambda: None, lambda: 2**10, lambda: None)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find_physical_batch(lambda batch: model(batch[:, :2]), torch.randn(4, 3), optimizer=optimizer, memory=memory)

"""Large logical batches on little memory: each is trained in physical batches, and noise is added once.

    python examples/gradient_accumulation.py

Under Poisson sampling (the default, and what the accountant assumes) a batch has a random size, and the way to split it
is Opacus's BatchMemoryManager. Without Poisson sampling several backward passes before one step add up as usual.
"""

import copy

import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine

SAMPLES, LOGICAL, PHYSICAL = 512, 64, 8


def make_parts(*, noise: float, poisson: bool, batch_size: int = LOGICAL):
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=batch_size),
        noise_multiplier=noise,
        max_grad_norm=0.5,
        poisson_sampling=poisson,
    )
    return engine, model, optimizer, loader


def weights(model: nn.Module) -> list[Tensor]:
    return [copy.deepcopy(p.detach()) for p in model.parameters()]


def train_step(model, optimizer, x, y) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def whole_batch() -> list[Tensor]:
    """One step on the whole logical batch at once."""
    _, model, optimizer, loader = make_parts(noise=0.0, poisson=False)
    train_step(model, optimizer, *next(iter(loader)))
    return weights(model)


def physical_batches() -> list[Tensor]:
    """The same step in pieces: `optimizer.step()` sums until the logical batch is complete, then updates."""
    _, model, optimizer, loader = make_parts(noise=0.0, poisson=False)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=PHYSICAL, optimizer=optimizer
    ) as physical_loader:
        for count, (x, y) in enumerate(physical_loader, start=1):
            train_step(model, optimizer, x, y)
            if count == LOGICAL // PHYSICAL:
                return weights(model)
    raise AssertionError("the loader ended before the logical batch did")


def backward_passes() -> list[Tensor]:
    """The same step by hand: several backward passes, one step. Only without Poisson sampling."""
    _, model, optimizer, loader = make_parts(noise=0.0, poisson=False, batch_size=PHYSICAL)
    optimizer.zero_grad()
    for _, (x, y) in zip(range(LOGICAL // PHYSICAL), loader, strict=False):
        F.cross_entropy(model(x), y).backward()  # not divided by the number of passes: the optimizer counts them
    optimizer.step()
    return weights(model)


def main() -> None:
    expected = whole_batch()
    for pieces in (physical_batches, backward_passes):
        for got, want in zip(pieces(), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        print(f"{pieces.__name__}: the same weights as one batch of {LOGICAL}")

    engine, model, optimizer, loader = make_parts(noise=1.0, poisson=True)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=PHYSICAL, optimizer=optimizer
    ) as physical_loader:
        for x, y in physical_loader:
            train_step(model, optimizer, x, y)
    steps = sum(count for _, _, count in engine.accountant.history)
    assert steps == len(loader), "the accountant counts logical batches, whatever their pieces"
    print(f"{steps} private steps in batches of at most {PHYSICAL}: ε = {engine.get_epsilon(delta=1e-5):.2f}")


if __name__ == "__main__":
    main()

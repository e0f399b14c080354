"""An Opacus loop put to the test: neighbouring batches, the noise, the accountant.

    python examples/check_opacus_loop.py

The loop is the one of any Opacus script, with SGD and a learning rate so large that updates are not lost in rounding.
"""

import copy

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine  # dpscope.flash.PrivacyEngine works as well
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpscope

DATA = TensorDataset(torch.randn(256, 16), torch.randint(3, (256,)))


def make_loop(noise_multiplier: float, max_grad_norm: float, seed: int) -> dpscope.Loop:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e6),
        data_loader=DataLoader(DATA, batch_size=16),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        noise_generator=torch.Generator().manual_seed(seed),
    )

    def step(batch: list[torch.Tensor]) -> None:
        x, y = batch
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return dpscope.Loop(
        model=model,
        step=step,
        scale=1e6 / optimizer.expected_batch_size,
        accountant=engine.accountant,
        sample_rate=16 / 256,
        loader=loader,
        save=lambda: copy.deepcopy(optimizer.state_dict()),
        resume=optimizer.load_state_dict,
    )


if __name__ == "__main__":
    found = dpscope.check_loop(make_loop, DataLoader(DATA, batch_size=8))
    print(found)
    assert found.ok

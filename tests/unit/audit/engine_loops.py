"""Loops of privacy engines, Opacus's and flash clipping's, as their users write them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpscope

SEEDED = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(64, 5, 6, generator=SEEDED), torch.randint(3, (64,), generator=SEEDED))
LEARNING_RATE = 1e6


class Pooled(nn.Module):
    """(B, T, d) -> (B, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inside(x)).mean(1))


def loop_of(engine_class, step_of=None, *, accountant="rdp", model=Pooled, **options):
    def make_loop(noise_multiplier, max_grad_norm, seed):
        engine, plain = engine_class(accountant=accountant), model()
        private, optimizer, _ = engine.make_private(
            module=plain,
            optimizer=torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE),
            data_loader=DataLoader(DATA, batch_size=8),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            **options,
        )

        def step(batch):
            optimizer.zero_grad()
            (step_of or ordinary)(private, *batch).backward()
            optimizer.step()

        return dpscope.Loop(
            model=private,
            step=step,
            scale=LEARNING_RATE / optimizer.expected_batch_size,
            accountant=engine.accountant,
            sample_rate=8 / 64,
            save=lambda: copy.deepcopy(optimizer.state_dict()),
            resume=optimizer.load_state_dict,
        )

    return make_loop


def ordinary(model, x, y):
    return F.cross_entropy(model(x), y)

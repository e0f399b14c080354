"""A small learnable task and its private training, shared by the tests of the Opacus side and of the loss scaler."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.flash import PrivacyEngine
from dpscope.flash.oracle import run_oracle

SAMPLES, FEATURES, CLASSES = 64, 8, 4

warnings.filterwarnings("ignore", message="Secure RNG turned off")


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


def make_data(seed: int = 1) -> TensorDataset:
    """Learnable: the class is the largest of four random projections."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1))


def make_loader(batch_size: int = 16) -> DataLoader:
    return DataLoader(make_data(), batch_size=batch_size)


def make_private(model, optimizer, engine=None, loader=None, **options):
    values = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "poisson_sampling": False, **options}
    engine = engine or PrivacyEngine()
    return engine.make_private(
        module=model, optimizer=optimizer, data_loader=make_loader() if loader is None else loader, **values
    )


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def step(model, optimizer, x, y) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def moved(before: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    return [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]


def clipped_mean(x, y, *, divisor: int, max_grad_norm: float = 0.5, model=None) -> list[torch.Tensor]:
    """What a step should apply, from micro-batches of one."""
    model = model or make_model()
    oracle = run_oracle(model, (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_grad_norm=max_grad_norm)
    assert (oracle.factors < 1).any()
    return [oracle.clipped_sums[name] / divisor for name, _ in model.named_parameters()]

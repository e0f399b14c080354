"""Seeded random data: the same values on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.workloads.configs import ImageConfig, TransformerConfig, WorkloadConfig
from dpscope.workloads.workload import Workload


def get_random_dataloader(
    config: WorkloadConfig,
    *,
    batch_size: int,
    seq_len: int | None = None,
    num_batches: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of (inputs, targets) that already lie on `device`.

    Drawn on the CPU and then moved, so that a seed means the same data everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = batch_size * num_batches
    if isinstance(config, TransformerConfig):
        length = config.resolve_seq_len(seq_len)
        tokens = torch.randint(config.vocab_size, (samples, length + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    elif isinstance(config, ImageConfig):
        inputs = torch.randn(samples, 3, config.image_size, config.image_size, generator=generator)
        targets = torch.randint(config.num_classes, (samples,), generator=generator)
    else:
        raise UserError(f"{config.name!r} makes its own batches: build_workload(config, …).batch(seed, device)")
    dataset = TensorDataset(inputs.to(device), targets.to(device))
    return DataLoader(dataset, batch_size=batch_size)


def random_workload(
    config: WorkloadConfig,
    model: Callable[[Any], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    batch_size: int,
    seq_len: int | None,
) -> Workload:
    """Return a model made of a config, on one random batch."""

    def batch(seed: int, device: torch.device) -> tuple[Tensor, ...]:
        loader = get_random_dataloader(config, batch_size=batch_size, seq_len=seq_len, seed=seed, device=device)
        found: tuple[Tensor, ...] = next(iter(loader))
        return found

    return Workload(model=partial(model, config), batch=batch, loss=loss)

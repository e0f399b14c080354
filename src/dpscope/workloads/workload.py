"""The contract between what is trained and how it is trained."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dpscope.workloads.configs import WorkloadConfig

Batch = Any  # a pytree of tensors whose first dimension is the sample


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, one batch and a loss, each built fresh by a callable.

    `loss(model, batch)` returns one loss per sample, shape (B,): the trainers take its mean over samples, and
    private methods need it sample by sample.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], Batch]  # (seed, device)
    loss: Callable[[nn.Module, Batch], Tensor]


def build_workload(config: WorkloadConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    module, _, function = config.builder.partition(":")
    build = getattr(importlib.import_module(module), function)
    return cast(Workload, build(config, batch_size=batch_size, seq_len=seq_len))

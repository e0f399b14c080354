"""A small image classifier: two convolutions, pooling, a Linear layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.workloads.configs import CNNConfig
from dpscope.workloads.data import random_workload
from dpscope.workloads.workload import Workload


def _norm(kind: str, channels: int) -> list[nn.Module]:
    if kind == "group":
        return [nn.GroupNorm(8, channels)]
    if kind == "batch":
        return [nn.BatchNorm2d(channels)]
    return []


class SmallCNN(nn.Sequential):
    """Images (B, 3, size, size) to class scores (B, classes)."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__(
            nn.Conv2d(3, 64, kernel_size=3, padding=1),
            *_norm(config.norm, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            *_norm(config.norm, 128),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(128, config.num_classes),
        )


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of each image: (B,)."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def build(config: CNNConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    return random_workload(config, SmallCNN, class_loss, batch_size=batch_size, seq_len=seq_len)

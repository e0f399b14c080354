"""What Opacus's tests use of torchvision, which need not be installed: made-up images and models with batch norm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class FakeData(Dataset):
    """Images of noise, each the same whenever it is read."""

    def __init__(self, size: int, image_size: tuple[int, ...], num_classes: int, transform: Callable[[Tensor], Tensor]):
        self.size, self.image_size, self.num_classes, self.transform = size, image_size, num_classes, transform
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand((size, *image_size), generator=generator)
        self.labels = torch.randint(num_classes, (size,), generator=generator)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


def compose(transforms: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    return lambda image: reduce(lambda value, transform: transform(value), transforms, image)


def normalize(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    return lambda image: (image - mean[0]) / std[0]


def small_model(**options: Any) -> nn.Module:
    """Convolution, batch norm, classifier: what the tests of validation look at."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.add_module("classifier", nn.Linear(8, 10))
    return model


def install() -> None:
    parts = {
        "transforms": {"Compose": compose, "ToTensor": lambda: torch.as_tensor, "Normalize": normalize},
        "datasets": {"FakeData": FakeData},
        "models": {"resnet18": small_model, "densenet121": small_model},
    }
    root = sys.modules["torchvision"] = ModuleType("torchvision")
    for name, members in parts.items():
        part = ModuleType(f"torchvision.{name}")
        vars(part).update(members)
        setattr(root, name, part)
        sys.modules[part.__name__] = part

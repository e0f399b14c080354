"""The small network for images of lessons 2 and 3: a step that normalises its batch image by image, or all at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from practice import captured, device_here
from torch import Tensor, nn


def normalise_one_by_one(batch: Tensor) -> Tensor:
    return torch.stack([(image - image.mean()) / image.std() for image in batch])


def normalise_at_once(batch: Tensor) -> Tensor:
    mean = batch.mean(dim=(1, 2, 3), keepdim=True)
    return (batch - mean) / batch.std(dim=(1, 2, 3), keepdim=True)


NORMALISE = {"one-by-one": normalise_one_by_one, "at-once": normalise_at_once}


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def make_step(normalise: Callable[[Tensor], Tensor], device: str, size: int = 128) -> Callable[[], None]:
    """Return a training step: normalise the batch, forward, backward, update."""
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.rand(size, 3, 12, 12, device=device)
    labels = torch.randint(10, (size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(normalise(images)), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--normalise", default="at-once", choices=[*NORMALISE])
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    step = make_step(NORMALISE[asked.normalise], device_here(), size=4096)
    for _ in range(5):
        step()  # warm up
    with captured(device_here()):
        for _ in range(asked.steps):
            step()

"""Case 6: one training step of a small classifier on images that arrive as bytes."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor, nn

SIDE, CLASSES = 32, 10
WIDTH = {"cuda": 2048, "cpu": 64}


def classifier(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width = WIDTH[device]
    layers = [nn.Linear(3 * SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, CLASSES)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def images_and_labels(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (size, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), labels).backward()
    optimizer.step()


def first(device: str, size: int) -> Step:
    model, optimizer = classifier(device)
    images, labels = images_and_labels(size)

    def step() -> None:
        prepared = [(image.float() / 255 - 0.5).flip(-1) for image in images]
        update(model, optimizer, torch.stack(prepared).to(device), labels.to(device))

    return step


def second(device: str, size: int) -> Step:
    model, optimizer = classifier(device)
    images, labels = images_and_labels(size)
    if device == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()

    def step() -> None:
        batch = images.to(device, non_blocking=True)
        prepared = (batch.float() / 255 - 0.5).flip(-1)
        update(model, optimizer, prepared, labels.to(device, non_blocking=True))

    return step


PROGRAM = Program(
    name="case_6",
    task="one training step of a small classifier on images",
    ways={"a": first, "b": second},
    sizes={"cuda": 512, "cpu": 64},
)

if __name__ == "__main__":
    run(PROGRAM)

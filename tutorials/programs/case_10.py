"""Case 10: a validation loop that adds up its loss."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor, nn

WIDTH = {"cuda": 2048, "cpu": 128}
LAYERS = 8


def model_and_batch(device: str, size: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    width = WIDTH[device]
    blocks = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*blocks).to(device), torch.randn(size, width, device=device)


def first(device: str, size: int) -> Step:
    model, batch = model_and_batch(device, size)
    total = torch.zeros((), device=device)

    def step() -> Tensor:
        nonlocal total
        total = total + (model(batch) - 1).square().mean()
        return total

    return step


def second(device: str, size: int) -> Step:
    step = first(device, size)
    return torch.no_grad()(step)


PROGRAM = Program(
    name="case_10",
    task="a validation loop that adds up its loss",
    ways={"a": first, "b": second},
    sizes={"cuda": 4096, "cpu": 64},
)

if __name__ == "__main__":
    run(PROGRAM)

"""Case 4: a validation loop that watches the mean activation of every layer, in two ways."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor, nn

WIDTH = {"cuda": 1024, "cpu": 128}
LAYERS = 32
LOGGED_EVERY = 100  # steps


def network(device: str, size: int) -> tuple[list[nn.Module], Tensor]:
    torch.manual_seed(0)
    width, dtype = WIDTH[device], torch.bfloat16 if device == "cuda" else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()).to(device, dtype) for _ in range(LAYERS)]
    return layers, torch.randn(size, width, device=device, dtype=dtype)


def first(device: str, size: int) -> Step:
    layers, batch = network(device, size)
    log: list[float] = []

    @torch.no_grad()
    def step() -> None:
        x = batch
        for layer in layers:
            x = layer(x)
            log.append(x.mean().item())

    return step


def second(device: str, size: int) -> Step:
    layers, batch = network(device, size)
    kept: list[Tensor] = []
    log: list[float] = []

    @torch.no_grad()
    def step() -> None:
        x = batch
        for layer in layers:
            x = layer(x)
            kept.append(x.mean())
        if len(kept) >= LOGGED_EVERY * LAYERS:
            log.extend(torch.stack(kept).tolist())
            kept.clear()

    return step


PROGRAM = Program(
    name="case_4",
    task="a validation step that watches the mean activation of 32 layers",
    ways={"a": first, "b": second},
    sizes={"cuda": 16384, "cpu": 4},
)

if __name__ == "__main__":
    run(PROGRAM)

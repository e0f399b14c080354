"""Case 7: one training step of a token classifier in which some positions carry no label."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = {"cuda": 2048, "cpu": 64}
LAYERS, CLASSES, NO_LABEL = 12, 32, -100


def training(device: str, size: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    width, dtype = WIDTH[device], torch.bfloat16 if device == "cuda" else torch.float32
    blocks = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*blocks, nn.Linear(width, CLASSES)).to(device, dtype)
    tokens = torch.randn(size, width, device=device, dtype=dtype)
    labels = torch.randint(CLASSES, (size,), device=device)
    return model, tokens, labels.masked_fill(torch.rand(size, device=device) < 0.15, NO_LABEL)


def first(device: str, size: int) -> Step:
    model, tokens, labels = training(device, size)

    def step() -> Tensor:
        model.zero_grad()
        logits = model(tokens)
        has_label = labels != NO_LABEL
        loss = F.cross_entropy(logits[has_label].float(), labels[has_label])
        loss.backward()
        return loss.detach()

    return step


def second(device: str, size: int) -> Step:
    model, tokens, labels = training(device, size)

    def step() -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).float(), labels, ignore_index=NO_LABEL)
        loss.backward()
        return loss.detach()

    return step


PROGRAM = Program(
    name="case_7",
    task="one training step of a token classifier with unlabelled positions",
    ways={"a": first, "b": second},
    sizes={"cuda": 2048, "cpu": 64},
)

if __name__ == "__main__":
    run(PROGRAM)

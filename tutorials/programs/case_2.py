"""Case 2: one optimizer step for `size` small parameters, in three ways."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor

NUMBERS = 256  # in a parameter
RATE = 1e-3


def parameters(device: str, size: int) -> tuple[list[Tensor], list[Tensor]]:
    made = [[torch.randn(NUMBERS, device=device) for _ in range(size)] for _ in range(2)]
    return made[0], made[1]


def first(device: str, size: int) -> Step:
    weights, gradients = parameters(device, size)

    def step() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.add_(gradient, alpha=-RATE)

    return step


def second(device: str, size: int) -> Step:
    weights, gradients = parameters(device, size)
    return lambda: torch._foreach_add_(weights, gradients, alpha=-RATE)


def third(device: str, size: int) -> Step:
    step = first(device, size)
    step()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step()
    return recorded.replay


PROGRAM = Program(
    name="case_2",
    task="one optimizer step for 400 small parameters",
    ways={"a": first, "b": second, "c": third},
    sizes={"cuda": 400, "cpu": 400},
    needs_cuda=("c",),
    work=lambda way, size: {"bytes": 3 * 4 * NUMBERS * size, "flops": 2 * NUMBERS * size},
)

if __name__ == "__main__":
    run(PROGRAM)

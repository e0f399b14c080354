"""Case 9: attention over long sequences, forward and backward."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor

HEADS, HEAD_WIDTH = 16, 64


def operands(device: str, size: int) -> list[Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (2, HEADS, size, HEAD_WIDTH)
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def backward(out: Tensor, leaves: list[Tensor]) -> Tensor:
    for leaf in leaves:
        leaf.grad = None
    out.float().square().mean().backward()
    return out.detach()


def first(device: str, size: int) -> Step:
    leaves = operands(device, size)

    def step() -> Tensor:
        q, k, v = leaves
        weights = (q @ k.mT / HEAD_WIDTH**0.5).float().softmax(-1).to(v.dtype)
        return backward(weights @ v, leaves)

    return step


def second(device: str, size: int) -> Step:
    leaves = operands(device, size)
    return lambda: backward(torch.nn.functional.scaled_dot_product_attention(*leaves), leaves)


PROGRAM = Program(
    name="case_9",
    task="attention over long sequences, forward and backward",
    ways={"a": first, "b": second},
    sizes={"cuda": 4096, "cpu": 64},
)

if __name__ == "__main__":
    run(PROGRAM)

"""Case 1: y = 2a + b for two large tensors, in two ways."""

from __future__ import annotations

import torch
from practice import Program, Step, run

FLOAT = 4  # bytes


def first(device: str, size: int) -> Step:
    a, b = (torch.randn(size, device=device) for _ in range(2))
    return lambda: a * 2 + b


def second(device: str, size: int) -> Step:
    a, b = (torch.randn(size, device=device) for _ in range(2))
    return lambda: torch.add(b, a, alpha=2)


def work(way: str, size: int) -> dict[str, float]:
    """Count reads and writes of whole tensors, and one multiplication and one addition for each number."""
    trips = {"a": 5, "b": 3}[way]
    return {"bytes": trips * FLOAT * size, "flops": 2 * size}


PROGRAM = Program(
    name="case_1",
    task="y = 2a + b for two large tensors",
    ways={"a": first, "b": second},
    sizes={"cuda": 2**28, "cpu": 2**21},
    work=work,
)

if __name__ == "__main__":
    run(PROGRAM)

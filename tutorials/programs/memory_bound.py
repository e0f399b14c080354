"""A memory-bound kernel: y = 2a + b on large tensors. The arithmetic is nothing; moving the numbers is everything.

In two operators, `a * 2` writes a tensor that the addition reads back: five trips through memory. `torch.add(b, a,
alpha=2)` does both at once in three. Finding: DRAM near its limit, arithmetic near zero; fewer bytes is the only way
to be faster.
"""

from __future__ import annotations

import torch
from practice import Program, Step, run

FLOAT = 4  # bytes


def two_operators(device: str, size: int) -> Step:
    a, b = (torch.randn(size, device=device) for _ in range(2))
    return lambda: a * 2 + b


def one_operator(device: str, size: int) -> Step:
    a, b = (torch.randn(size, device=device) for _ in range(2))
    return lambda: torch.add(b, a, alpha=2)


def work(way: str, size: int) -> dict[str, float]:
    """Reads and writes of whole tensors: a, t | t, b, y against a, b, y. One multiplication and one addition each."""
    trips = {"two_operators": 5, "one_operator": 3}[way]
    return {"bytes": trips * FLOAT * size, "flops": 2 * size}


PROGRAM = Program(
    name="memory_bound",
    finding="DRAM is near its limit and arithmetic near zero: only fewer bytes make it faster.",
    ways={"two_operators": two_operators, "one_operator": one_operator},
    sizes={"cuda": 2**28, "cpu": 2**21},
    work=work,
)

if __name__ == "__main__":
    run(PROGRAM)

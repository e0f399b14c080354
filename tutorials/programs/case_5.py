"""Case 5: the product of two square matrices, in two ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
from practice import Program, Step, run


def product_in(dtype: torch.dtype) -> Callable[[str, int], Step]:
    def make(device: str, size: int) -> Step:
        torch.set_float32_matmul_precision("highest")  # float32 means float32, not TF32
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return lambda: a @ b

    return make


def work(way: str, size: int) -> dict[str, float]:
    """Count size³ multiply-adds, two operations each; at least two matrices are read and one is written."""
    return {"bytes": 3 * size**2 * {"a": 4, "b": 2}[way], "flops": 2 * size**3}


PROGRAM = Program(
    name="case_5",
    task="the product of two square matrices",
    ways={"a": product_in(torch.float32), "b": product_in(torch.bfloat16)},
    sizes={"cuda": 8192, "cpu": 384},
    work=work,
)

if __name__ == "__main__":
    run(PROGRAM)

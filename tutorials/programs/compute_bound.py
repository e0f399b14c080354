"""A compute-bound kernel: the product of two square matrices. Every number is used `size` times once it is there.

Finding: arithmetic is near the limit of the unit that does it. In float32 that unit is the FMA pipe; in bfloat16 it
is the tensor cores, whose limit is more than ten times as high. A faster number format helps; fewer bytes hardly do.
"""

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
    """size³ multiply-adds, two operations each; at least two matrices are read and one is written."""
    return {"bytes": 3 * size**2 * {"float32": 4, "bfloat16": 2}[way], "flops": 2 * size**3}


PROGRAM = Program(
    name="compute_bound",
    finding="Arithmetic is at the limit of its pipe and DRAM is idle: a faster number format helps.",
    ways={"float32": product_in(torch.float32), "bfloat16": product_in(torch.bfloat16)},
    sizes={"cuda": 8192, "cpu": 384},
    work=work,
)

if __name__ == "__main__":
    run(PROGRAM)

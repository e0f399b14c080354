"""The norm of every sample's weight gradient of a Linear layer, which clipping needs, in two ways.

x: (B, T, d) went into the layer, g: (B, T, d) came back. A sample's gradient is the d×d matrix Σ_t g_t x_tᵀ.
`gradients` forms all B of them and takes their norms: B·d² numbers go to memory and come back. `gram` uses ‖Σ_t g_t
x_tᵀ‖² = Σ_ts (x_t·x_s)(g_t·g_s) and keeps tiles of both products in registers (dpscope's own kernel): nothing of
size d² or T² is ever in memory.
"""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor

from dpscope.flash.kernels.gram_norms import GramUnit, gram_norms_squared

SAMPLES = 8


def layer(device: str, size: int) -> tuple[Tensor, Tensor]:
    width = 2 * size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, g = (torch.randn(SAMPLES, size, width, device=device, dtype=dtype) for _ in range(2))
    return x, g


def gradients(device: str, size: int) -> Step:
    x, g = layer(device, size)
    return lambda: torch.linalg.vector_norm(g.mT @ x, dim=(1, 2), dtype=torch.float32)


def gram(device: str, size: int) -> Step:
    x, g = layer(device, size)
    unit = GramUnit(gs=(g,), xs=(x,))
    return lambda: gram_norms_squared([unit]).sqrt()


PROGRAM = Program(
    name="per_sample_norms",
    task="the norm of every sample's gradient of one Linear layer",
    ways={"gradients": gradients, "gram": gram},
    sizes={"cuda": 1024, "cpu": 64},
)

if __name__ == "__main__":
    run(PROGRAM)

"""The noise of elements by itself, as `add_noise_` adds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.kernels.triton_runtime import Backend


def noise_values(
    shape: Sequence[int],
    seed: int,
    offset: int,
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Return z of the elements first, first+1, … under the key (seed, offset), float32."""
    values = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
    add_noise_([values], 1.0, 1.0, seed, offset, starts=[first], backend=backend)
    return values

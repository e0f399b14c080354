"""A micro-batch inside a CUDA graph: what the host gives each replay, and what a replay leaves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpscope.flash.gradients.clip_rules import ClipRule


class CapturedBatch(NamedTuple):
    """Tensors that each replay fills: clipped sums, norms, factors, dropped samples, and the clipping rule's count."""

    sums: dict[nn.Parameter, Tensor]
    norms: Tensor
    factors: Tensor
    dropped: Tensor
    observed: Tensor | None


class StaticInputs:
    """Numbers of a replay that the host decides, in device memory: the bounds, and how many rows are samples."""

    def __init__(self, clip: ClipRule, size: int, device: torch.device) -> None:
        self._clip = clip
        self._filled = list(clip.bounds)
        self.bounds = torch.tensor(self._filled, dtype=torch.float64, device=device).unsqueeze(1)
        self.real = torch.full((), size, dtype=torch.int64, device=device)

    def fill(self, real: int) -> None:
        """Write the numbers of the next replay. One number is written without waiting for the device."""
        self.real.fill_(real)
        if self._clip.bounds != self._filled:
            self._filled = list(self._clip.bounds)
            if len(self._filled) == 1:
                self.bounds.fill_(self._filled[0])
            else:
                self.bounds.copy_(torch.tensor(self._filled, dtype=torch.float64).unsqueeze(1))

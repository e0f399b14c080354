"""Small per-sample gradients (biases, norm layers) under a rule with many groups: normed and summed all at once.

Each has factors of its own, so kernels that take one factor for each sample would be launched once for each of them.
Beside the products of a model they are little: here they lie beside one another in float64, (B, N).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpscope.flash.torch_side.captures import device_cache

MOST_EACH = 2**16  # elements a sample of one of them
MOST = 2**24  # elements of all of them


class GroupedKept:
    """Per-sample gradients of several parameters, (B, *shape) each."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._shapes = [each.shape[1:] for each in values]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._dtypes = [torch.promote_types(each.dtype, torch.float32) for each in values]
        dtype = torch.float32 if values[0].device.type == "mps" else torch.float64  # which MPS has not
        self._values = torch.cat([each.flatten(1) for each in values], 1).to(dtype)

    def squares(self) -> list[Tensor]:
        """Return the squared norms of each, (B,)."""
        return [part.sum(1) for part in torch.split(self._values.square(), self._sizes, 1)]

    def sums(self, scales: Tensor, groups: Sequence[int]) -> list[Tensor]:
        """Return Σ_b scales[groups[i], b] v_b of each, given `scales`: (G, B)."""
        owners = _owners(tuple(self._sizes), tuple(groups), self._values.device)
        factors = scales.to(self._values.dtype).mT.index_select(1, owners)
        total = torch.where(factors != 0, self._values * factors, 0.0).sum(0)
        if len(set(self._dtypes)) == 1:
            total = total.to(self._dtypes[0])
        parts = zip(torch.split(total, self._sizes), self._shapes, self._dtypes, strict=True)
        return [part.view(shape).to(dtype) for part, shape, dtype in parts]


def is_small(values: Tensor) -> bool:
    """Return True if per-sample gradients are small enough to be put beside others."""
    return len(values) > 0 and 0 < values[0].numel() <= MOST_EACH


@device_cache(maxsize=256)
def _owners(sizes: tuple[int, ...], groups: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for each of the elements that lie beside one another, the group of its tensor."""
    return torch.repeat_interleave(torch.tensor(groups), torch.tensor(sizes)).to(device)

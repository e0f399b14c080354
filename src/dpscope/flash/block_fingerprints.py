"""Whether a block that runs again gives its layers the gradients that it gave them in the backward pass.

Each layer's g is projected on fixed signs, sample by sample: Σ_{t,j} u_t v_j g_tj. A difference δ between two runs
moves the projection by about ‖δ‖, whatever its direction; rounding moves it by about ε‖g‖.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpscope.flash.contributions import Contribution, Kept, Saved
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.slots import Slot

Left = dict[Slot, list[Contribution]]  # what the layers of a block leave
ZERO = torch.zeros((), dtype=torch.float64)

# How far a projection may move, of the norm of all gradients of the block. Where kernels repeat themselves it does not
# move at all. Where they add in any order (attention's, on a GPU) elements round another way, and so does what follows
# from them, until about half a unit of the last place differs everywhere: 3e-3 of the norm in bf16; this is six times
# as much.
REPEATED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
REPEATED_TF32 = 5e-3


def tolerance_of(dtypes: Collection[torch.dtype], device: torch.device) -> float:
    """`dtypes`: in which the block computes."""
    tf32 = torch.float32 in dtypes and operand_rounding(device) > 0.0
    return max(REPEATED_TF32 if tf32 else 0.0, *(REPEATED.get(dtype, 0.0) for dtype in dtypes))


@lru_cache(maxsize=256)
def _signs(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).to(device, dtype)


def _project(tensor: Tensor) -> Tensor:
    """(B, …) -> (B,)."""
    if tensor.dtype == torch.float16:  # sums would overflow
        tensor = tensor.float()
    rows = tensor.reshape(tensor.shape[0], -1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1, 1)
    sums = rows @ _signs(rows.shape[2], rows.dtype, rows.device)
    return sums.double() @ _signs(rows.shape[1], torch.float64, rows.device)


def project(left: Left) -> Tensor | None:
    """(parameters, B) of what a block's layers have left; None where that is nothing at all."""
    projections = [sum((_project(_gradient(part)) for part in parts), start=ZERO) for parts in left.values()]
    known = [each for each in projections if each is not ZERO]
    return (
        torch.stack([torch.zeros_like(known[0]) if each is ZERO else each for each in projections]) if known else None
    )


class Fingerprint(NamedTuple):
    """Of a backward pass: (parameters, B) projections, and the norms that differences are held against."""

    projections: Tensor
    scales: Tensor
    tolerance: float

    @classmethod
    def of(cls, left: Left, dtypes: Collection[torch.dtype]) -> Fingerprint:
        """`dtypes`: in which the block computes, besides those of what its layers have left."""
        # Sums over positions (biases, norm layers) are larger than the gradients of positions: each has its own scale.
        kinds = [any(isinstance(part, Kept) for part in parts) for parts in left.values()]
        tensors = [[_gradient(part) for part in parts] for parts in left.values()]
        norms = {
            kind: kept_norms_squared([t for each, k in zip(tensors, kinds, strict=True) if k == kind for t in each])
            for kind in set(kinds)
        }
        projections = project(left)
        assert projections is not None
        scales = torch.stack([norms[kind].sqrt() for kind in kinds])
        dtypes = {*dtypes, *(tensor.dtype for each in tensors for tensor in each)}
        return cls(projections, scales, tolerance_of(dtypes, projections.device))

    def differs(self, left: Left, finite: Tensor | None) -> Tensor:
        """Whether another run left something else, for any sample that has a share (of all finite ones if unknown)."""
        projections = project(left)
        other = torch.zeros_like(self.projections) if projections is None else projections
        judged = self.projections.isfinite() & self.scales.isfinite()
        if finite is not None:
            judged &= finite
        moved = ~((self.projections - other).abs() <= self.tolerance * self.scales)
        return (moved & judged).any()


def _gradient(part: Contribution) -> Tensor:
    if isinstance(part, Kept):
        return part.values
    assert isinstance(part, Saved)
    return part.g

"""Whether a block that runs again gives its layers the gradients that it gave them in the backward pass.

What its layers leave is projected on fixed signs, sample by sample (kernels/projections.py). A difference δ between
two runs moves the projection by about ‖δ‖, whatever its direction; rounding moves it by about ε‖g‖.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpscope.flash.contributions import Contribution, Kept, Saved
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.projections import projections
from dpscope.flash.slots import Slot

Left = dict[Slot, list[Contribution]]  # what the layers of a block leave

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


def project(left: Left) -> dict[bool, Tensor]:
    """(2, B) each, of sums over positions (True) and of the gradients of positions (False): projections and squares."""
    found: dict[bool, tuple[list[Tensor], list[int]]] = {}
    for number, parts in enumerate(left.values()):
        for part in parts:
            values, numbers = found.setdefault(isinstance(part, Kept), ([], []))
            values.append(gradient_of(part))
            numbers.append(number)
    return {kind: projections(values, numbers) for kind, (values, numbers) in found.items()}


class Fingerprint(NamedTuple):
    """Of a backward pass: what `project` gives, and how far a projection may move, of the norm of its kind.

    Sums over positions (biases, norm layers) are larger than the gradients of positions: each kind has its own norm.
    """

    kinds: dict[bool, Tensor]
    tolerance: float

    @classmethod
    def of(cls, left: Left, dtypes: Collection[torch.dtype]) -> Fingerprint:
        """`dtypes`: in which the block computes, besides those of what its layers have left."""
        tensors = [gradient_of(part) for parts in left.values() for part in parts]
        dtypes = {*dtypes, *(tensor.dtype for tensor in tensors)}
        return cls(project(left), tolerance_of(dtypes, tensors[0].device))


def different(before: Sequence[Fingerprint], again: Sequence[dict[bool, Tensor]], finite: Tensor | None) -> list[bool]:
    """Whether blocks that ran again left something else, for any sample that has a share (any finite one, if unknown).

    `again`: what `project` gives of each. All blocks are compared at once, and the host waits for the device once.
    """
    blocks = [block for block, each in enumerate(before) for _ in each.kinds]
    first = torch.stack([found for each in before for found in each.kinds.values()])  # (blocks × kinds, 2, B)
    others = [others.get(kind) for each, others in zip(before, again, strict=True) for kind in each.kinds]
    second = torch.stack([torch.zeros_like(first[0, 0]) if other is None else other[0] for other in others])
    tolerances = first.new_tensor([before[block].tolerance for block in blocks]).unsqueeze(1)
    projected, scale = first[:, 0], first[:, 1].sqrt()
    judged = projected.isfinite() & scale.isfinite()
    if finite is not None:
        judged &= finite
    moved = ~((projected - second).abs() <= tolerances * scale) & judged
    differing = {block for block, row in zip(blocks, moved.any(1).tolist(), strict=True) if row}
    return [block in differing for block in range(len(before))]


def gradient_of(part: Contribution) -> Tensor:
    if isinstance(part, Kept):
        return part.values
    assert isinstance(part, Saved)
    return part.g

"""Fingerprints of blocks, to check that a rerun gave the layers the same inputs and gradients as the backward pass.

The contributions of its layers are projected on fixed signs, sample by sample (kernels/projections.py). A difference δ
between two runs moves the projection by about ‖δ‖, in any direction; rounding moves it by about ε‖g‖. Norms are
compared as well: rounding hardly changes them, and a common factor changes nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.projections import projections
from dpscope.flash.torch_side import dry_run

Left = dict[Slot, list[Contribution]]  # what the layers of a block leave

# How far a projection may move, of the norm of all gradients of the block. Where kernels repeat themselves it does not
# move at all. Where they add in any order (attention's, on a GPU) elements round another way, and so does what follows
# from them, until about half a unit of the last place differs everywhere: 3e-3 of the norm in bf16; this is six times
# as much.
REPEATED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
REPEATED_TF32 = 5e-3
NORM_IS_STEADIER = 4.0
"""How much less a norm may move than a projection."""


def tolerance_of(dtypes: Collection[torch.dtype], device: torch.device) -> float:
    """Return the tolerance of two runs of a block that computes in these dtypes."""
    tf32 = torch.float32 in dtypes and operand_rounding(device) > 0.0
    return max(REPEATED_TF32 if tf32 else 0.0, *(REPEATED.get(dtype, 0.0) for dtype in dtypes))


LEFT_SUMS, LEFT_GRADIENTS, LEFT_INPUTS = "sums over positions", "gradients of positions", "inputs"


def project(left: Left) -> dict[str, Tensor]:
    """Return projections and squares of each kind, (2, B). Inputs only if every layer has left something."""
    found: dict[str, tuple[list[Tensor], list[int]]] = {}

    def add(kind: str, tensor: Tensor, number: int) -> None:
        values, numbers = found.setdefault(kind, ([], []))
        values.append(tensor)
        numbers.append(number)

    complete = all(left.values())
    for number, parts in enumerate(left.values()):
        for part in parts:
            add(LEFT_GRADIENTS if part.saved else LEFT_SUMS, gradient_of(part), number)
            if complete and part.saved:
                x = part.saved[0]
                add(LEFT_INPUTS, x if x.is_floating_point() else x.double(), number)  # ids are numbers as good as any
    return {kind: projections(values, numbers) for kind, (values, numbers) in found.items()}


class Fingerprint(NamedTuple):
    """Fingerprint of a backward pass: the result of `project`, and the tolerance, relative to the norm of its kind.

    Sums over positions (biases, norm layers) are larger than the gradients of positions: each kind has its own norm.
    """

    kinds: dict[str, Tensor]
    tolerance: float

    @classmethod
    def of(cls, left: Left, dtypes: Collection[torch.dtype]) -> Fingerprint:
        """Return the fingerprint of a block that computes in `dtypes` and in those of its layers' contributions."""
        tensors = [gradient_of(part) for parts in left.values() for part in parts]
        dtypes = {*dtypes, *(tensor.dtype for tensor in tensors)}
        return cls(project(left), tolerance_of(dtypes, tensors[0].device))


def different(before: Sequence[Fingerprint], again: Sequence[dict[str, Tensor]], finite: Tensor | None) -> list[bool]:
    """Return True for each block whose rerun differs, for any sample with a share (any finite one, if unknown).

    `again`: the result of `project` for each. All blocks are compared at once; the host waits for the device once.
    """
    if dry_run.current() is not None:
        return [False] * len(before)
    blocks, pairs = [], []
    for block, (each, others) in enumerate(zip(before, again, strict=True)):
        for kind, found in each.kinds.items():
            other = others.get(kind)
            # Of layers that left nothing, zeros: but their inputs may be any.
            if other is not None or kind != LEFT_INPUTS:
                blocks.append(block)
                pairs.append((found, torch.zeros_like(found) if other is None else other))
    first, second = (torch.stack(side) for side in zip(*pairs, strict=True))  # (blocks × kinds, 2, B)
    tolerances = first.new_tensor([before[block].tolerance for block in blocks]).unsqueeze(1)
    projected, norm = first[:, 0], first[:, 1].sqrt()
    judged = projected.isfinite() & norm.isfinite()
    if finite is not None:
        judged &= finite
    same = (projected - second[:, 0]).abs() <= tolerances * norm
    same &= (norm - second[:, 1].sqrt()).abs() <= tolerances / NORM_IS_STEADIER * norm
    moved = ~same & judged
    differing = {block for block, row in zip(blocks, moved.any(1).tolist(), strict=True) if row}
    return [block in differing for block in range(len(before))]


def gradient_of(part: Contribution) -> Tensor:
    """Return what a layer left of its gradient: that of positions, or per-sample gradients."""
    return part.saved[-1] if part.saved else part.materialise()

"""Squared norms of per-sample weight gradients by the triangular Gram path, batched over layers.

A weight W (p×d) that is applied to x_t (d) and receives g_t (p) at T positions has the per-sample gradient
Σ_t g_t x_tᵀ, and

    ‖Σ_t g_t x_tᵀ‖² = Σ_{t,s} (x_t·x_s)(g_t·g_s) = Σ_{t≥s} w_ts (x_t·x_s)(g_t·g_s),   w_ts = 2 for t > s, 1 for t = s.

Only tiles on and below the diagonal are visited. A program computes one tile of both Gram matrices in registers,
multiplies them elementwise and writes one float32: neither T×T matrix is ever in memory, and the d×p gradient is never
formed. Weights that share their input (q, k, v) are one unit: the g are put side by side, so x's tile is computed once.

All units of one length and dtype are served by one launch: the grid is units × samples × tiles, and a table holds
pointers, widths and strides. One layer of a transformer at T=256 has fewer tiles than a large GPU has multiprocessors;
all of its layers together fill it, and cost the host one launch.

Accumulation: bfloat16 and float16 by tensor cores into float32; float32 by three products of its halves in tf32, which
keeps 22 bits of each factor, is as near as a product in float32 and more than twice as fast as cuBLAS's, or by one
product where TF32 holds the operands as they are; float64 in float64. Each program owns its slots of the partial sums,
so the result is deterministic.

Guarantee: a sample's result depends on that sample's rows alone, and no norm is too small by more than about 5e-4 of
itself. Rounding errs relative to S², S = Σ_t ‖g_t‖‖x_t‖, not to the norm: by about 1e-8·S² in float32 (measured on an
H200, 2026-11-15). Where a sample's positions cancel almost completely the computed square may be far too small, and a
large gradient would pass unclipped. So each unit's square is taken to be at least

    FLOOR · S²,     FLOOR = 2⁻¹⁴ (2⁻⁴⁰ in float64)

Above the floor the error is a small fraction of the square; below it the norm is over-estimated, which clips more,
never less. Incoherent positions give a square of S²/T or more, so up to T = 2¹⁴ ordinary data never meets the floor.

Every finite input has its norm. Squares of values below about 1e-19 or above 1e19 leave the range of float32, so each
position with ‖x_t‖² or ‖g_t‖² below SMALL is counted with the most that may have been lost of it,

    lost = Σ_t √(‖x_t‖² + d·2⁻¹²⁶) √(‖g_t‖² + p·2⁻¹²⁶)     over those t,

and a sample whose square is not finite, or not large beside lost², is computed once more in float64, which holds the
squares of all float32 squares. The kernel for that runs after every launch and ends at once if there is nothing to do,
so that the device never waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import is_

import torch
from torch import Tensor

from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.gram_kernels import FLOOR, FLOOR_FLOAT64, NEGLIGIBLE, SMALL, UNDERFLOW
from dpscope.flash.kernels.gram_units import (
    GramTiles,
    GramUnit,
    KindPlan,
    UnitKind,
    is_worth_aligning,
    launch_gram,
    plan_units,
)
from dpscope.flash.kernels.triton_runtime import (
    Backend,
    most_at_once,
    rows_are_aligned,
    slices,
    use_triton,
    with_aligned_rows,
)
from dpscope.flash.torch_side import dry_run


def gram_norms_squared(
    units: Sequence[GramUnit],
    *,
    backend: Backend = "auto",
    tiles: GramTiles | None = None,
) -> Tensor:
    """Return Σ over units of ‖Σ_t g_t x_tᵀ‖² for each sample, (B,) float64.

    Units share B; T, widths and dtypes may differ. `tiles` forces a configuration (for measurements).
    """
    parts = [squares for _, squares in gram_norms_apart(units, backend=backend, tiles=tiles)]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).sum(0)


def gram_norms_apart(
    units: Sequence[GramUnit], *, backend: Backend = "auto", tiles: GramTiles | None = None
) -> list[tuple[Sequence[int], Tensor]]:
    """Return ‖Σ_t g_t x_tᵀ‖² of each unit by itself: numbers of units, and their squares, (units, B) float64."""
    if not units:
        raise ValueError("gram_norms_squared needs at least one unit")
    device = units[0].gs[0].device
    batch = units[0].gs[0].shape[0]
    plans, pointers = plan_units(units, batch)
    by_kernel = [_is_launched(plan.kind, batch, device, backend) for plan in plans]
    arranged = _arranged(units, list(compress(plans, by_kernel)), device)
    if arranged is not None:
        units = arranged
        plans, pointers = plan_units(units, batch)
        by_kernel = [_is_launched(plan.kind, batch, device, backend) for plan in plans]
    launched = list(compress(plans, by_kernel))
    squares = launch_gram(launched, units, pointers, batch, device, tiles) if launched else []
    parts: list[tuple[Sequence[int], Tensor]] = list(zip((plan.members for plan in launched), squares, strict=True))
    for plan, chosen in zip(plans, by_kernel, strict=True):
        if not chosen:
            parts.append((plan.members, _gram_norms_torch([units[member] for member in plan.members])))
    return parts


def _is_launched(kind: UnitKind, batch: int, device: torch.device, backend: Backend) -> bool:
    served = batch > 0 and kind.length > 0 and kind.served
    why_not = f"dtypes {kind.x_dtype}, {kind.g_dtype}, B={batch}, T={kind.length}"
    return use_triton(backend, device, served=served, why_not=why_not)


def _arranged(units: Sequence[GramUnit], plans: list[KindPlan], device: torch.device) -> list[GramUnit] | None:
    """Copy tensors that kernels cannot read, or only slowly, and return the new units; None if no copy is needed."""
    arranged = list(units)
    for kind, members, *_ in plans:
        aligns = is_worth_aligning(kind, device)
        if aligns or not kind.row_major:
            for member in members:
                unit = arranged[member]
                gs, xs = (tuple([_with_rows(each, aligns) for each in side]) for side in (unit.gs, unit.xs))
                arranged[member] = unit._replace(gs=gs, xs=xs)
    return None if all(map(is_, arranged, units)) else arranged


def _with_rows(tensor: Tensor, aligns: bool) -> Tensor:
    """Return the tensor, or a copy with contiguous features, padded to rows of whole words if `aligns`."""
    if aligns:
        return tensor if rows_are_aligned(tensor) else with_aligned_rows(tensor)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


# -- torch -------------------------------------------------------------------------------------------------------------


def _sums_by_torch(unit: GramUnit, dtype: torch.dtype) -> Tensor:
    """Return Σ w_ts (x_t·x_s)(g_t·g_s), S and `lost`, (3, B), computed by strips of rows."""
    batch, length, g_width = unit.gs[0].shape[0], unit.gs[0].shape[1], sum(g.shape[2] for g in unit.gs)
    x_width = sum(x.shape[2] for x in unit.xs)
    sums = torch.zeros(3, batch, dtype=dtype, device=unit.gs[0].device)
    squares, lengths, lost = sums.unbind(0)
    # Shorter strips leave out more of the upper half, until products are too small for the processor.
    rows = min(max(64, length // 4), 512, most_at_once(length * dtype.itemsize))
    for chosen in slices(batch, rows * length * dtype.itemsize):
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            if unit.ids is None:
                x_gram = _gram_strip(unit.xs, chosen, start, stop, dtype)
            else:
                ids = unit.ids[chosen]
                match = ids[:, start:stop, None] == ids[:, None, :stop]
                if unit.padding_idx is not None:
                    match &= (ids[:, start:stop] != unit.padding_idx)[:, :, None]
                x_gram = match.to(dtype)
            g_gram = _gram_strip(unit.gs, chosen, start, stop, dtype)
            if dtype == torch.float32:
                x_own, g_own = (gram[:, :, start:].diagonal(dim1=1, dim2=2) for gram in (x_gram, g_gram))
                most = (x_own + x_width * UNDERFLOW).sqrt() * (g_own + g_width * UNDERFLOW).sqrt()
                lost[chosen] += most.where((x_own < SMALL) | (g_own < SMALL), 0.0).sum(1)
            products = x_gram.mul_(g_gram)
            # Columns before the strip are below the diagonal and count twice; the strip's own square holds both halves.
            own = products[:, :, start:]
            squares[chosen] += 2 * products[:, :, :start].sum(dim=(1, 2)) + own.sum(dim=(1, 2))
            lengths[chosen] += own.diagonal(dim1=1, dim2=2).sqrt().sum(1)
    return sums


def _gram_norms_torch(units: list[GramUnit]) -> Tensor:
    """Compute the same with torch: (units, B) float64."""
    rounded = operand_rounding(units[0].gs[0].device) > 0.0  # float32 operands would be: the norms are of exact ones
    if rounded or any(tensor.dtype == torch.float64 for unit in units for tensor in (*unit.gs, *unit.xs)):
        wide = [_floored(_sums_by_torch(unit, torch.float64), FLOOR_FLOAT64) for unit in units]
        return torch.stack(wide)
    sums = torch.stack([_sums_by_torch(unit, torch.float32) for unit in units], 1)
    squares = torch.stack([_floored(each.double(), FLOOR) for each in sums.unbind(1)])
    again = ~(sums.isfinite().all(0) & (sums[2].double().square() <= NEGLIGIBLE * sums[0]))
    for index in [] if dry_run.current() is not None else again.any(1).nonzero().flatten().tolist():
        chosen = again[index].nonzero().flatten()
        unit = units[index]
        gs, xs = (tuple(tensor[chosen].double() for tensor in side) for side in (unit.gs, unit.xs))
        ids = None if unit.ids is None else unit.ids[chosen]
        squares[index, chosen] = _floored(_sums_by_torch(GramUnit(gs, xs, ids, unit.padding_idx), torch.float64), FLOOR)
    return squares


def _floored(sums: Tensor, floor: float) -> Tensor:
    """Return max(square, floor·S²), NaN if either is: see the guarantee above. sums: (3, B)."""
    return torch.maximum(sums[0], sums[1].square() * floor)


def _gram_strip(tensors: Sequence[Tensor], chosen: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Multiply rows [start, stop) by rows [0, stop) of the chosen samples: (b, stop-start, stop)."""
    strip: Tensor | None = None
    for tensor in tensors:
        rows = tensor[chosen, :stop]
        converted_bytes = 0 if tensor.dtype == dtype else rows.shape[:2].numel() * dtype.itemsize
        for part in slices(max(1, tensor.shape[2]), converted_bytes):
            converted = rows[:, :, part].to(dtype)
            product = torch.bmm(converted[:, start:], converted.mT)
            strip = product if strip is None else strip.add_(product)
    assert strip is not None
    return strip

"""Several uses of one parameter: their contributions are added before the norm is taken, so no cross term is missing.

||Σ_i A_i||² of contributions A_i of one sample: uses with a common closed form are put together (Outer beside Outer and
Lookup beside Lookup stand one after the other along T); an embedding tied to the head has its own cross term, or its
rows are added to the head's gradients where those are kept; any other mix is materialised and added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from dpscope.flash.gradients import contributions
from dpscope.flash.gradients.contributions import Contribution, Kept, Lookup, Outer, wide
from dpscope.flash.gradients.paths import DIRECT, GRAM, KEEP, RANK1, Decision, PathRules, exact_path
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.triton_runtime import SCRATCH_BYTES


def cross_terms(lookup: Lookup, outer: Outer) -> Tensor:
    """Return the inner product of an embedding's and a tied head's gradients, Σ_{t,s} G'[s, id_t]·(g_t·x'_s), (B,).

    `lookup`: ids and g of the embedding; `outer`: x', G' of the head, G': (B, S, rows). Taken over slices of t, so
    that the (B, S, slice) scratch stays bounded.
    """
    ids, g = lookup.ids, lookup.without_padding(lookup.g)
    x, head = outer.x, outer.g
    dtype = wide(g.dtype)
    batch, length = ids.shape
    step = max(1, SCRATCH_BYTES // max(1, batch * head.shape[1] * 8))
    total = torch.zeros(batch, dtype=torch.float64, device=g.device)
    for start in range(0, length, step):
        part = slice(start, start + step)
        picked = head.gather(2, ids[:, None, part].expand(-1, head.shape[1], -1).to(torch.int64))  # (B, S, t)
        products = torch.bmm(x.to(dtype), g[:, part].to(dtype).transpose(1, 2))  # (B, S, t)
        total += (picked.double() * products.double()).sum((1, 2))
    return total


def _tied_decision(outer: Outer) -> Decision:
    """Return the path of an embedding tied to a head.

    If products are rounded, rank-1 is not exact, because the uses may cancel. Nor is gram, because its cross term is
    computed from values that are not rounded.
    """
    decision = outer.decision
    rounded = exact_path(GRAM, outer.g) != GRAM
    instead = {RANK1: KEEP, GRAM: DIRECT} if rounded else {}
    return replace(decision, path=instead.get(decision.path, decision.path))


def tied_norms_squared(lookup: Lookup, outer: Outer) -> Tensor:
    """Compute both norms by the direct path: per-sample gradients in slices of the batch, squared and dropped."""
    dtype = wide(outer.g.dtype)
    norms = []
    for part in contributions.chunks(outer.batch_size, lookup.rows * outer.x.shape[-1] * dtype.itemsize):
        table = Lookup(lookup.ids[part], lookup.g[part].to(dtype), lookup.rows, lookup.padding_idx, lookup.decision)
        products = contributions.wide_product(outer.g[part].transpose(1, 2), outer.x[part])
        norms.append(kept_norms_squared([products.add_(table.materialise())]))
    return torch.cat(norms)


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that hold the same values in the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _merge_outers(outers: list[Outer], rules: PathRules) -> Outer:
    """Merge Σ_i Σ_t g_t x_tᵀ into one product: uses of the same x add their g, others are concatenated along T."""
    merged: list[tuple[Tensor, Tensor]] = []
    for outer in outers:
        for index, (x, g) in enumerate(merged):
            if place_of(x) == place_of(outer.x):
                merged[index] = (x, g + outer.g)
                break
        else:
            merged.append((outer.x, outer.g))
    x, g = merged[0]
    if len(merged) > 1:
        dtype = reduce(torch.promote_types, (x.dtype for x, _ in merged))
        x, g = (torch.cat([each.to(dtype) for each in tensors], 1) for tensors in zip(*merged, strict=True))
    return Outer(x, g, rules.of_product(x.shape, g))


def _merge_lookups(lookups: list[Lookup], rules: PathRules) -> Lookup:
    first = lookups[0]
    ids = torch.cat([lookup.ids.to(torch.int64) for lookup in lookups], 1)
    g = torch.cat([lookup.without_padding(lookup.g) for lookup in lookups], 1)
    return Lookup(ids, g, first.rows, None, rules.of_lookup(*ids.shape))


def combine(parts: list[Contribution], dtype: torch.dtype, rules: PathRules) -> tuple[Contribution, ...]:
    """Combine all uses of one parameter into one piece, or a Lookup beside an Outer (an embedding tied to the head).

    Uses without a closed form for their cross terms are materialised in the parameter's `dtype` and added, because the
    norm is that of the sum. A combination takes the path of the whole.
    """
    if len(parts) == 1:
        return (parts[0],)
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(outers) + len(lookups) == len(parts):
        if len(outers) > 1:
            outers = [_merge_outers(outers, rules)]
        if len(lookups) > 1:
            lookups = [_merge_lookups(lookups, rules)]
        if outers and lookups:
            outers[0].decision = _tied_decision(outers[0])
        return (*lookups, *outers)
    kept = [part for part in parts if isinstance(part, Kept)]
    if len(kept) == 1 and len(lookups) == len(parts) - 1 and kept[0].owned and kept[0].values.is_contiguous():
        for lookup in lookups:
            lookup.add_into(kept[0].values)
        return (kept[0],)
    total: Tensor | None = None
    while parts:
        part = parts.pop()
        values = part.materialise()
        if total is None:
            total = values.to(dtype, copy=part.is_borrowed)
        else:
            total.add_(values)
    assert total is not None
    return (Kept(total),)


def describe_combined(slot: Slot, parts: tuple[Contribution, ...], uses: int) -> None:
    """Describe the combination of several uses, for explain()."""
    decision = parts[-1].decision or Decision(KEEP, "they have no closed form, and are added")
    slot.describe(
        " + ".join(part.kind for part in parts),
        replace(decision, reason=f"{uses} uses of the parameter together: {decision.reason}"),
        {name: shape for part in parts for name, shape in part.shapes.items()},
    )

"""Slots, one for each trainable parameter: they collect contributions, which are put together before the norm is taken.

Uses of a parameter are added first, so that no cross term is missing:
||Σ_i A_i||² of contributions A_i of one sample: uses with a common closed form are put together (Outer beside Outer and
Lookup beside Lookup stand one after the other along T); an embedding tied to the head has its own cross term, or its
rows are added to the head's gradients where those are kept; any other mix is materialised and added.

Rows of one sample are its augmented views (K each), or the rows of one user. Its gradient is the mean over its rows,
and is clipped as one. Layers and forward passes only know rows. Their records are combined here as they arrive. A
product treats the rows of a sample as more positions of it, so with K rows each nothing is copied.

Hooks on parameters (`p.register_hook`, `p.register_post_accumulate_grad_hook`) are called with the ordinary gradient,
which flash clipping never computes. A hook that scales, masks or logs it would silently not run, so hooks are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import reduce
from operator import attrgetter
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Contribution, Kept, Lookup, Outer, Tied, wide, wide_product
from dpscope.flash.gradients.paths import KEEP, Decision, PathRules, tied_decision
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.triton_runtime import slices
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.shards import is_whole_of

_GRADIENT_HOOKS, _ACCUMULATED_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
NO_SHAPES: Mapping[str, torch.Size] = MappingProxyType({})


class Slot:
    __slots__ = ("contributions", "decision", "kind", "module", "name", "parameter", "shapes", "whole", "why")

    decision: Decision | None

    def __init__(self, name: str, parameter: nn.Parameter, module: str) -> None:
        self.name = name
        self.parameter = parameter
        self.module = module
        self.contributions: list[Contribution] = []
        self.whole: nn.Parameter | None = None  # what FSDP2 puts in the place of a shard around forward
        self.describe("", "not reached by a backward pass yet")

    def describe(self, kind: str, why: str | Decision, shapes: Mapping[str, torch.Size] = NO_SHAPES) -> None:
        """Record the last contribution and its path, for explain()."""
        self.kind, self.shapes = kind, shapes
        self.decision, self.why = (None, why) if isinstance(why, str) else (why, why.reason)

    def add(self, contribution: Contribution) -> None:
        """Add a contribution. Per-sample gradients are added into those that are held already, if possible."""
        held = self.contributions
        if not (held and held[-1].absorb(contribution, self.parameter.dtype)):
            held.append(contribution)

    def stands_for(self, parameter: nn.Parameter | None) -> bool:
        """Return True if `parameter` is this slot's own, the whole one of which that is a shard, or made up for it."""
        if getattr(parameter, "is_made_up", False):
            return True
        if self.whole is None and is_whole_of(parameter, self.parameter):
            self.whole = parameter
        return parameter is not None and (parameter is self.parameter or parameter is self.whole)


class OwnGradients:
    """Gradients of parameters that the engine asks autograd for itself: hooks on parameters see them, too."""

    are_taken = False  # not by thread: autograd calls hooks in threads of its own

    def taken(self) -> AbstractContextManager[None]:
        return temporarily(self, are_taken=True)


OWN_GRADIENTS = OwnGradients()


def refuse_hooks(slots: Iterable[Slot], *, guards: int) -> None:
    """Raise UserError if a parameter has a hook. `guards`: how many are the engine's own."""
    slots = [*slots]
    parameters = [slot.parameter for slot in slots]
    before, after = (filter(None, map(hooks, parameters)) for hooks in (_GRADIENT_HOOKS, _ACCUMULATED_HOOKS))
    if max(map(len, before), default=0) + max(map(len, after), default=0) <= guards:  # as a rule
        return
    for slot in slots:
        parameter = slot.parameter
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        if hooks > guards:
            raise UserError(
                f"{slot.name} has a gradient hook, which flash clipping would never call because it makes no ordinary "
                "gradient: remove the hook, and change the private gradient before the optimizer's update instead"
            )


# -- uses of one parameter, and rows of one sample ---------------------------------------------------------------------


def cross_terms(lookup: Lookup, outer: Outer) -> Tensor:
    """Return the inner product of an embedding's and a tied head's gradients, Σ_{t,s} G'[s, id_t]·(g_t·x'_s), (B,).

    `lookup`: ids and g of the embedding; `outer`: x', G' of the head, G': (B, S, rows). Taken over slices of t, so
    that the (B, S, slice) scratch stays bounded.
    """
    ids, g = lookup.ids, lookup.without_padding(lookup.g)
    x, head = outer.x, outer.g
    dtype = wide(g.dtype)
    batch, length = ids.shape
    total = torch.zeros(batch, dtype=torch.float64, device=g.device)
    for part in slices(length, batch * head.shape[1] * 8, scratch=True):
        picked = head.gather(2, ids[:, None, part].expand(-1, head.shape[1], -1).to(torch.int64))  # (B, S, t)
        products = torch.bmm(x.to(dtype), g[:, part].to(dtype).transpose(1, 2))  # (B, S, t)
        total += (picked.double() * products.double()).sum((1, 2))
    return total


def tied_norms_squared(lookup: Lookup, outer: Outer) -> Tensor:
    """Compute both norms by the direct path: per-sample gradients in slices of the batch, squared and dropped."""
    dtype = wide(outer.g.dtype)
    norms = []
    for part in slices(outer.batch_size, lookup.rows * outer.x.shape[-1] * dtype.itemsize, scratch=True):
        table = Lookup(lookup.ids[part], lookup.g[part].to(dtype), lookup.rows, lookup.padding_idx, lookup.decision)
        products = wide_product(outer.g[part].transpose(1, 2), outer.x[part])
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


def combine(parts: list[Contribution], dtype: torch.dtype, rules: PathRules) -> Contribution:
    """Combine all uses of one parameter into one.

    Uses without a closed form for their cross terms are materialised in the parameter's `dtype` and added, because the
    norm is that of the sum. A combination takes the path of the whole.
    """
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(outers) + len(lookups) == len(parts):
        if len(outers) > 1:
            outers = [_merge_outers(outers, rules)]
        if len(lookups) > 1:
            ids = torch.cat([lookup.ids.to(torch.int64) for lookup in lookups], 1)
            g = torch.cat([lookup.without_padding(lookup.g) for lookup in lookups], 1)
            lookups = [Lookup(ids, g, lookups[0].rows, None, rules.of_lookup(*ids.shape))]
        if outers and lookups:
            outers[0].decision = tied_decision(outers[0].decision, outers[0].g)
            return Tied(lookups[0], outers[0])
        return (lookups or outers)[0]
    kept = [part for part in parts if isinstance(part, Kept)]
    if len(kept) == 1 and len(lookups) == len(parts) - 1 and kept[0].owned and kept[0].values.is_contiguous():
        for lookup in lookups:
            lookup.add_into(kept[0].values)
        return kept[0]
    total: Tensor | None = None
    while parts:
        part = parts.pop()
        values = part.materialise()
        if total is None:
            total = values.to(dtype, copy=part.is_borrowed)
        else:
            total.add_(values)
    assert total is not None
    return Kept(total)


def combine_uses(slot: Slot, contributions: list[Contribution], rules: PathRules) -> Contribution:
    """Combine several uses of a slot's parameter, and describe that for explain()."""
    uses = len(contributions)
    combined = combine(contributions, slot.parameter.dtype, rules)
    decision = combined.decision or Decision(KEEP, "they have no closed form, and are added")
    decision = replace(decision, reason=f"{uses} uses of the parameter together: {decision.reason}")
    slot.describe(combined.kind, decision, combined.shapes)
    return combined


class RowGroups:
    """Groups of K consecutive rows a sample, or those that `places` gives: (samples, K) row numbers, or -1.

    ids  of the samples, on all ranks, if they have any
    """

    def __init__(self, each: int, places: Tensor | None = None, ids: frozenset[int] | None = None) -> None:
        if not isinstance(each, int) or each < 1:
            raise UserError(f"rows_per_sample must be a whole number of at least 1, not {each!r}")
        self.each, self._places, self.ids = each, places, ids
        self.is_plain = each == 1 and places is None  # each row is a sample

    @classmethod
    def of_ids(cls, ids: Tensor) -> RowGroups:
        """Return the groups of rows with equal ids, (rows,)."""
        try:
            ids = torch.as_tensor(ids)  # a list, or an array of numpy
        except (TypeError, ValueError) as error:
            raise UserError("rows are grouped by one whole number for each row: number the users") from error
        if ids.dim() != 1 or (ids.is_floating_point() and len(ids)):  # an empty list gives floats
            raise UserError(f"rows are grouped by one whole number for each row, not by a tensor of {tuple(ids.shape)}")
        samples, group, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        order = group.argsort(stable=True)
        first = counts.cumsum(0) - counts  # of each group, among the sorted rows
        most = max(counts.tolist(), default=1)
        places = ids.new_full((len(counts), most), -1, dtype=torch.long)
        places[group[order], torch.arange(len(ids), device=ids.device) - first[group[order]]] = order
        return cls(most, places, frozenset(samples.tolist()))

    def put_together(self, contribution: Contribution, rules: PathRules) -> Contribution:
        """Return the record of a backward pass, sample by sample."""
        if self._places is not None:
            if contribution.batch_size != self.row_count(0):
                raise UserError(
                    f"{self.row_count(0)} rows were grouped, but the model was called with {contribution.batch_size}"
                )
        elif contribution.batch_size % self.each:
            raise UserError(
                f"the model was called with {contribution.batch_size} rows, which is no multiple of rows_per_sample="
                f"{self.each}: give it the {self.each} rows of each sample beside one another"
            )
        return contribution.grouped(self._group, rules)

    def _group(self, rows: Tensor) -> Tensor:
        """Return rows (B·k, ...) as (B, k, ...), with zeros where a sample has fewer than k."""
        if self._places is not None:
            index = self._places.flatten().to(rows.device)
            there = (index >= 0).view(-1, *[1] * (rows.dim() - 1))
            rows = torch.where(there, rows[index.clamp_min(0)], 0)
        return rows.reshape(-1, self.each, *rows.shape[1:])

    def row_count(self, samples: int) -> int:
        """Return the number of rows of so many samples."""
        return samples * self.each if self._places is None else int((self._places >= 0).sum())

    def multiplier(self, samples: int, *, mean: bool) -> float | Tensor:
        """Return the factor that turns a recorded gradient into the mean over a sample's rows."""
        rows = self.row_count(samples) if mean else 1
        if self._places is None:
            return rows / self.each
        return rows / (self._places >= 0).sum(1).double()

"""Per-sample squared norms over all parameters of a closed micro-batch, and the factors that follow from them.

Everything is normed here together, not layer by layer: one call for all Gram units, in which layers that read the same
x (q, k, v) share a unit; one call for all per-sample gradients that are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.contributions import Contribution, Kept, Lookup, Outer, Tied
from dpscope.flash.gradients.paths import DIRECT, GRAM, RANK1, exact_path
from dpscope.flash.gradients.slots import cross_terms, place_of, tied_norms_squared
from dpscope.flash.kernels.float32_products import reads_tf32, truncated_to_tf32
from dpscope.flash.kernels.gram_norms import gram_norms_apart, gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.scaled_sum import MIN_SCALE
from dpscope.flash.torch_side.captures import device_cache

# Larger norms of what was recorded count as not finite, and so do samples whose factor is too small to be applied
# (`MIN_SCALE`). Beyond, a product overflows float32 on some paths and not on others, and the path depends on the batch:
# without this bound the other samples of a batch would decide whether such a sample has a share.
LARGEST_NORM = 1e30

# ‖A + B‖² of a tied embedding and head is ‖A‖² + ‖B‖² + 2⟨A, B⟩, each known to about 1e-5 in float32. Where the uses
# cancel, that error is all that is left; below this share of ‖A‖² + ‖B‖² the norm is over-estimated instead, which only
# clips more.
TIED_FLOOR = 2.0**-7
TIED_FLOOR_FLOAT64 = 2.0**-30

# Of small per-sample gradients that are normed together: elements a sample of one of them, and of all of them.
MOST_EACH, MOST = 2**16, 2**24


def as_summed(part: Contribution) -> Contribution:
    """Return a contribution in the form that is normed and summed: materialised if it is kept."""
    values = part.kept_product()
    return part if values is None else Kept(values)


class SquaredNorms:
    """Squared norms of G groups of parameters, (G, B). Gram units and kept gradients wait until all are known."""

    def __init__(self, groups: int, batch: int, device: torch.device) -> None:
        self._groups, self._batch, self._device = groups, batch, device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # which costs nothing, and MPS has not
        self._rows: dict[int, Tensor] = {}  # (B,) by group
        self._of_all: list[Tensor] = []  # (G, B)
        self._sharing: dict[tuple[object, ...], tuple[int, Tensor, list[Tensor]]] = {}
        self._reads_tf32 = reads_tf32(device)  # the operands of float32 products
        self._truncated: dict[tuple[object, ...], Tensor] = {}
        self._lookups: list[tuple[int, GramUnit]] = []
        self._kept: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._squares: defaultdict[int, list[Tensor]] = defaultdict(list)

    def add(self, norms_squared: Tensor, groups: Sequence[int] | None = None) -> None:
        """Add squared norms, (G, B), of some groups or of all."""
        if groups is None:
            self._of_all.append(norms_squared)
            return
        for group, squared in zip(groups, norms_squared, strict=True):
            self.add_row(group, squared)

    def add_row(self, group: int, norms_squared: Tensor) -> None:
        """Add squared norms of one group, (B,)."""
        squared, before = norms_squared.to(self._dtype), self._rows.get(group)
        self._rows[group] = squared if before is None else before + squared

    def add_all(self, parts: list[Contribution | None], groups: Sequence[int], without: Collection[int] = ()) -> None:
        """Count the contributions of every parameter, given its group, and replace them by what is kept from now on.

        without: places of parameters that are counted already
        """
        for index, (part, group) in enumerate(zip(parts, groups, strict=True)):
            if part is None or index in without:
                continue
            if part.decision is None:  # as most are, of hundreds in a step
                self._count(group, part)
            else:
                parts[index] = self.add_part(group, part)

    def add_part(self, group: int, part: Contribution) -> Contribution:
        """Count one parameter's contribution. Return what is kept of it from now on."""
        part = as_summed(part)
        if self._reads_tf32 and type(part) is Outer and part.decision.path == GRAM and part.g.dtype == torch.float32:
            part = self._truncate(part)  # a Gram norm is exact for operands that TF32 holds
            self._share(group, part)
        else:
            self._count(group, part)
        return part

    def _count(self, group: int, part: Contribution) -> None:
        """Count one contribution. Some wait, to be normed together with others."""
        if (squares := part.square_parts()) is not None:
            self._squares[group].append(squares)
        elif isinstance(part, Kept):
            self._kept[group].append(part.values)
        elif isinstance(part, Lookup) and part.decision.path == GRAM:
            self._lookups.append((group, GramUnit(gs=(part.g,), ids=part.ids, padding_idx=part.padding_idx)))
        elif isinstance(part, Outer) and (path := exact_path(part.decision.path, part.g)) != DIRECT:
            if path == RANK1:
                self.add_row(group, part.rank1_norms_squared())
            else:
                self._share(group, part)
        elif isinstance(part, Tied):
            self.add_row(group, self._of_tied(part.lookup, part.outer))
        else:
            self.add_row(group, part.norms_squared())

    def _of_tied(self, lookup: Lookup, outer: Outer) -> Tensor:
        if outer.decision.path == DIRECT:
            return tied_norms_squared(lookup, outer)
        alone = SquaredNorms(1, self._batch, self._device)
        alone._count(0, lookup)
        alone._count(0, outer)
        (apart,) = alone.result()  # ‖A‖² + ‖B‖²
        floor = TIED_FLOOR_FLOAT64 if outer.g.dtype == torch.float64 else TIED_FLOOR
        return torch.maximum(apart + 2 * cross_terms(lookup, outer).to(apart), apart * floor)

    def _truncate(self, part: Outer) -> Outer:
        """Return operands truncated to TF32, if torch rounds them, so that the Gram norm and the sum agree.

        Truncation takes off less than that rounding would. An input that several layers read is truncated once.
        """
        key = place_of(part.first)
        x = self._truncated.get(key)
        if x is None:
            x = self._truncated[key] = truncated_to_tf32(part.first)
        return Outer(x, truncated_to_tf32(part.g), part.decision)

    def _share(self, group: int, part: Outer) -> None:
        """Put layers of one group that read the same x (q, k, v) into one Gram unit."""
        x, g = part.first, part.g
        self._sharing.setdefault((group, *place_of(x), g.dtype), (group, x, []))[2].append(g)

    def result(self) -> Tensor:
        """Return squared norms, (G, B). They may hold inf or NaN: such samples are dropped, not repaired."""
        self._add_units()
        for group, values in self._kept.items():
            self.add_row(group, kept_norms_squared(values))
        for group, squares in self._squares.items():
            self.add_row(group, torch.cat(squares, 1).sum(1))
        if len(self._rows) < self._groups:
            zeros = torch.zeros(self._batch, dtype=self._dtype, device=self._device)
            self._rows = {**dict.fromkeys(range(self._groups), zeros), **self._rows}
        total = torch.stack([self._rows[group] for group in range(self._groups)])
        for squared in self._of_all:
            total += squared.to(total)
        return total

    def _add_units(self) -> None:
        """Add the norms of the Gram units that wait, those of all groups in one launch."""
        waiting = [
            (group, GramUnit(gs=tuple(gs), xs=(x,), in_tf32=self._reads_tf32 and gs[0].dtype == torch.float32))
            for group, x, gs in self._sharing.values()
        ] + self._lookups
        self._sharing, self._truncated, self._lookups = {}, {}, []
        units = [unit for _, unit in waiting]
        if self._groups == 1 and units:
            self.add_row(0, gram_norms_squared(units))
        elif units:
            for (group, _), squared in zip(waiting, gram_norms_apart(units), strict=True):
                self.add_row(group, squared)


class GroupedKept:
    """Small per-sample gradients (biases, norm layers) under a rule with many groups: normed and summed all at once.

    Each has factors of its own, so kernels that take one factor for each sample would be launched once for each of
    them. Beside the products of a model they are little: here they lie beside one another in float64, (B, N).

    places: of those parameters among all, whose contributions are `parts`
    """

    def __init__(self, parts: Sequence[Contribution | None], groups: Sequence[int]) -> None:
        held = {at: None if part is None else part.per_sample for at, part in enumerate(parts)}
        kept = {at: each for at, each in held.items() if each is not None and len(each)}
        small = {at: each for at, each in kept.items() if 0 < each[0].numel() <= MOST_EACH}
        if sum(each.numel() for each in small.values()) > MOST:
            small = {}
        self.places, values = dict.fromkeys(small), list(small.values())
        self._owners = [groups[at] for at in small]
        if not small:
            return
        self._shapes = [each.shape[1:] for each in values]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._dtypes = [torch.promote_types(each.dtype, torch.float32) for each in values]
        dtype = torch.float32 if values[0].device.type == "mps" else torch.float64  # which MPS has not
        self._values = torch.cat([each.flatten(1) for each in values], 1).to(dtype)

    def add_to(self, norms: SquaredNorms) -> None:
        """Add their squared norms."""
        if self.places:
            squares = torch.split(self._values.square(), self._sizes, 1)
            for group, part in zip(self._owners, squares, strict=True):
                norms.add_row(group, part.sum(1))

    def sums(self, scales: Tensor) -> list[Tensor]:
        """Return Σ_b scales[group, b] v_b of each, given `scales`: (G, B)."""
        owners = _owners(tuple(self._sizes), tuple(self._owners), self._values.device)
        factors = scales.to(self._values.dtype).mT.index_select(1, owners)
        total = torch.where(factors != 0, self._values * factors, 0.0).sum(0)
        if len(set(self._dtypes)) == 1:
            total = total.to(self._dtypes[0])
        parts = zip(torch.split(total, self._sizes), self._shapes, self._dtypes, strict=True)
        return [part.view(shape).to(dtype) for part, shape, dtype in parts]


@device_cache(maxsize=256)
def _owners(sizes: tuple[int, ...], groups: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for each of the elements that lie beside one another, the group of its tensor."""
    return torch.repeat_interleave(torch.tensor(groups), torch.tensor(sizes)).to(device)


@dataclass(frozen=True)
class Factors:
    """Norms of the true per-sample gradients, factors, and what recorded gradients are multiplied by: (G, B) each.

    finite: (B,) which rows have a share in every group; padding has none.
    """

    norms: Tensor
    factors: Tensor
    scale: Tensor
    finite: Tensor


def clip_factors(
    squared: Tensor,
    rule: ClipRule,
    multiplier: float | Tensor,
    real: int | Tensor | None = None,
    bounds: Tensor | None = None,
) -> Factors:
    """Return the factors of a rule; 0 where a group's norm is not finite or above `LARGEST_NORM`.

    `squared`: (G, B). `multiplier` turns a recorded gradient into the sample's own: B for a mean over B samples, over
    the loss scale. `real`: rows from there on are padding, with factor 0 whatever their norm. `bounds`: those of the
    rule, (G, 1) on the device; None takes them from the rule.
    """
    recorded = squared.clamp_min(0.0).sqrt()
    norms = recorded * multiplier
    several = len(rule.bounds) > 1
    if bounds is None and several:
        bounds = _bounds_on(tuple(rule.bounds), norms.dtype, norms.device)
    factors = rule.factors(norms, rule.bounds[0] if bounds is None else bounds)
    scale = factors * multiplier
    small = (scale < MIN_SCALE) & (factors != 0)
    shares = torch.isfinite(squared) & (recorded <= LARGEST_NORM) & ~small
    if real is not None:
        shares &= torch.arange(shares.shape[1], device=shares.device) < real
    zero = torch.zeros_like(norms)
    return Factors(norms, torch.where(shares, factors, zero), torch.where(shares, scale, zero), shares.all(0))


@device_cache(maxsize=256)
def _bounds_on(bounds: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bounds of all groups, (G, 1). The copy to the device waits for it, so it is made once."""
    return torch.tensor(bounds, dtype=dtype, device=device).unsqueeze(1)

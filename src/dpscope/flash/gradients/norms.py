"""Per-sample squared norms over all parameters of a closed micro-batch, and the factors that follow from them.

Everything is normed here together, not layer by layer: one call for all Gram units, in which layers that read the same
x (q, k, v) share a unit; one call for all per-sample gradients that are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.contributions import Contribution, Kept, Lookup, Outer, Tied
from dpscope.flash.gradients.paths import DIRECT, GRAM, RANK1, exact_path
from dpscope.flash.gradients.slots import cross_terms, place_of, tied_norms_squared
from dpscope.flash.kernels.float32_products import reads_tf32, truncated_to_tf32
from dpscope.flash.kernels.gram_norms import gram_norms_apart, gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.kernels.kept_gradients import kept_norms_apart, kept_norms_squared
from dpscope.flash.kernels.scaled_sum import MIN_SCALE
from dpscope.flash.kernels.tensor_lists import alike, seen_of
from dpscope.flash.torch_side.captures import device_cache

_DTYPE = attrgetter("dtype")

# Larger norms of what was recorded count as not finite, and so do samples whose factor is too small to be applied
# (`MIN_SCALE`). Beyond, a product overflows float32 on some paths and not on others, and the path depends on the batch:
# without this bound the other samples of a batch would decide whether such a sample has a share.
LARGEST_NORM = 1e30

# ‖A + B‖² of a tied embedding and head is ‖A‖² + ‖B‖² + 2⟨A, B⟩, each known to about 1e-5 in float32. Where the uses
# cancel, that error is all that is left; below this share of ‖A‖² + ‖B‖² the norm is over-estimated instead, which only
# clips more.
TIED_FLOOR = 2.0**-7
TIED_FLOOR_FLOAT64 = 2.0**-30


def as_summed(part: Contribution) -> Contribution:
    """Return a contribution in the form that is normed and summed: materialised if it is kept."""
    values = part.kept_product()
    return part if values is None else Kept(values)


class SquaredNorms:
    """Squared norms of G groups of parameters, (G, B). Gram units and kept gradients wait until all are known."""

    def __init__(self, groups: int, batch: int, device: torch.device) -> None:
        self._groups, self._batch, self._device = groups, batch, device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # which costs nothing, and MPS has not
        self._rows: list[tuple[list[int], Tensor]] = []  # groups, and squares of some of their parameters, (n, B)
        self._of_all: list[Tensor] = []  # (G, B)
        self._products: list[tuple[int, Outer]] = []
        self._reads_tf32 = reads_tf32(device)  # the operands of float32 products
        self._truncated: dict[tuple[object, ...], Tensor] = {}
        self._lookups: list[tuple[int, GramUnit]] = []
        self._kept: list[tuple[int, Tensor]] = []
        self._squares: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._waiting: list[tuple[int, Contribution]] = []  # for their squares

    def add(self, norms_squared: Tensor, groups: Sequence[int] | None = None) -> None:
        """Add squared norms, (G, B), of some groups or of all."""
        if groups is None:
            self._of_all.append(norms_squared)
        else:
            self._rows.append(([*groups], norms_squared.to(self._dtype)))

    def add_row(self, group: int, norms_squared: Tensor) -> None:
        """Add squared norms of one group, (B,)."""
        self.add(norms_squared.unsqueeze(0), [group])

    def add_all(self, parts: list[Contribution | None], groups: Sequence[int]) -> None:
        """Count the contributions of every parameter, given its group, and replace them by what is kept from now on."""
        for index, (part, group) in enumerate(zip(parts, groups, strict=True)):
            if part is None:
                continue
            if part.values is not None and part.squares is None:  # as most are, of hundreds in a step
                self._kept.append((group, part.values))
            else:
                parts[index] = self.add_part(group, part)

    def add_part(self, group: int, part: Contribution) -> Contribution:
        """Count one parameter's contribution. Return what is kept of it from now on."""
        if type(part) is Outer and part.decision.path == GRAM:
            truncated = self._reads_tf32 and part.g.dtype == torch.float32
            if truncated or exact_path(GRAM, part.g) == GRAM:
                part = self._truncate(part) if truncated else part  # exact for operands that TF32 holds
                self._products.append((group, part))
                return part
        part = as_summed(part)
        self._count(group, part)
        return part

    def _count(self, group: int, part: Contribution) -> None:
        """Count one contribution. Some wait, to be normed together with others."""
        if part.squares_wait:
            self._waiting.append((group, part))
        elif (squares := part.square_parts()) is not None:
            self._squares[group].append(squares)
        elif isinstance(part, Kept):
            self._kept.append((group, part.values))
        elif isinstance(part, Lookup) and part.decision.path == GRAM:
            self._lookups.append((group, GramUnit(gs=(part.g,), ids=part.ids, padding_idx=part.padding_idx)))
        elif isinstance(part, Outer) and (path := exact_path(part.decision.path, part.g)) != DIRECT:
            if path == RANK1:
                self.add_row(group, part.rank1_norms_squared())
            else:
                self._products.append((group, part))
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

    def result(self) -> Tensor:
        """Return squared norms, (G, B). They may hold inf or NaN: such samples are dropped, not repaired."""
        self._add_units()
        kept = [values for _, values in self._kept]
        if self._groups == 1 and kept:
            self.add_row(0, kept_norms_squared(kept))
        elif kept:
            for members, found in kept_norms_apart(kept):
                self.add(found, [self._kept[at][0] for at in members])
        waiting, self._waiting = self._waiting, []
        for of_class in alike(type(part) for _, part in waiting).values():
            parts = [waiting[at][1] for at in of_class]
            for at, found in zip(of_class, parts[0].squares_of(parts), strict=True):
                self._squares[waiting[at][0]].append(found)
        for group, squares in self._squares.items():
            self.add_row(group, torch.cat(squares, 1).sum(1))
        owners = tuple(group for groups, _ in self._rows for group in groups)
        zeros = torch.zeros((1, self._batch), dtype=self._dtype, device=self._device)
        total = torch.cat([*(squares for _, squares in self._rows), zeros])
        if self._groups == 1:
            total = total.sum(0, keepdim=True)
        else:
            places, most = _places(owners, self._groups, self._device)
            total = total.index_select(0, places)
            total = total if most == 1 else total.view(self._groups, most, self._batch).sum(1)
        for squared in self._of_all:
            total += squared.to(total)
        return total

    def _add_units(self) -> None:
        """Add the norms of the Gram units that wait, those of all groups in one launch."""
        groups = [group for group, _ in self._products]
        xs, gs = [part.first for _, part in self._products], [part.g for _, part in self._products]
        # Layers of one group that read the same x (q, k, v) share a unit.
        places = zip(groups, map(Tensor.data_ptr, xs), seen_of(xs), map(_DTYPE, gs), strict=True)
        waiting = self._lookups
        for (group, *_, dtype), sharing in alike(places).items():
            own, in_tf32 = tuple([gs[at] for at in sharing]), self._reads_tf32 and dtype == torch.float32
            waiting.append((group, GramUnit(gs=own, xs=(xs[sharing[0]],), in_tf32=in_tf32)))
        self._products, self._truncated, self._lookups = [], {}, []
        units = [unit for _, unit in waiting]
        if self._groups == 1 and units:
            self.add_row(0, gram_norms_squared(units))
        elif units:
            for members, squares in gram_norms_apart(units):
                self.add(squares, [waiting[at][0] for at in members])


@device_cache(maxsize=256)
def _places(owners: tuple[int, ...], groups: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the places of each group among `owners`, as many for all: those missing lie behind the last."""
    found: list[list[int]] = [[] for _ in range(groups)]
    for place, group in enumerate(owners):
        found[group].append(place)
    most = max(map(len, found))
    padded = [place for places in found for place in (*places, *[len(owners)] * (most - len(places)))]
    return torch.tensor(padded, device=device), most


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
    shares = (recorded <= LARGEST_NORM) & ((scale >= MIN_SCALE) | (factors == 0))
    if real is not None:
        shares &= torch.arange(shares.shape[1], device=shares.device) < real
    zero = factors.new_zeros(())
    return Factors(norms, torch.where(shares, factors, zero), torch.where(shares, scale, zero), shares.all(0))


@device_cache(maxsize=256)
def _bounds_on(bounds: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bounds of all groups, (G, 1). The copy to the device waits for it, so it is made once."""
    return torch.tensor(bounds, dtype=dtype, device=device).unsqueeze(1)

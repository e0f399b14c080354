"""A closed micro-batch: contributions in, norms and factors, clipped sums out, one parameter at a time.

Inside a CUDA graph the host gives each replay its `StaticInputs`, and a replay fills its sums and `Clipped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.contributions import Contribution, Kept, refuse_complex
from dpscope.flash.gradients.norms import Factors, SquaredNorms, as_summed, clip_factors
from dpscope.flash.gradients.paths import PathRules
from dpscope.flash.gradients.slots import RowGroups, Slot, combine_uses
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.kept_gradients import kept_sums
from dpscope.flash.kernels.sample_sums import many_bias_sums
from dpscope.flash.step.step_state import Recorded
from dpscope.flash.torch_side.autocast import no_autocast

# Sums of at most about this size are made and updated at once: few launches, and x and g are freed as they come.
GROUP_BYTES = 1 << 30
# Where a step may take little more than it does already, groups are as small as this, and as much is left for scratch.
# So they are for what a CUDA graph gave out: that was copied, and the graph keeps its memory. On an H200 at 8 × 256 of
# preset 1b torch reserves 22.8 GiB with this, 24.7 with the other, and 22.7 for ordinary training (2026-11-16).
LEAST_GROUP_BYTES = 1 << 28
# A CPU gains nothing from large groups. With small ones, x and g of a large weight are freed before the next sum.
CPU_GROUP_BYTES = 1 << 20

EACH_ROW = RowGroups(1)

Normed = tuple[Tensor, Sequence[int] | None]  # (G, B) squared norms, and the groups that they are of: None is all
RunningSum = Callable[[nn.Parameter], Tensor | None]
MadeSums = dict[nn.Parameter, Tensor]
Combined = list[Contribution | None]  # of each parameter; None where they were taken


class SumBatch(NamedTuple):
    """Clipped sums that were made at once, in columns, because a step has hundreds of them and host time matters.

    The sum of parameter i is Σ_b factors_b·tensors[i]_b, with tensors[i]: (B, *shape), or tensors[i] itself where
    factors is None. Of factors (G, B), it takes row rows[i]. A sample whose factor is 0 is to be ignored: it may hold
    NaN.
    """

    parameters: list[nn.Parameter]
    tensors: list[Tensor]
    factors: Tensor | None
    rows: Sequence[int] = ()

    def items(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return pairs of a parameter and its sum, where sums need no factors."""
        return zip(self.parameters, self.tensors, strict=True)

    def added(self, into: RunningSum | None) -> SumBatch:
        """Return the running sums with these added to them; where there are none, these."""
        before = [into(parameter) if into else None for parameter in self.parameters]
        sums = [new if old is None else old.add_(new) for old, new in zip(before, self.tensors, strict=True)]
        return SumBatch(self.parameters, sums, None)


class Clipped(NamedTuple):
    """Norms and factors of a micro-batch by row, dropped samples, and the clipping rule's count. Replays fill them."""

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


class MicroBatch:
    """On construction norms and factors are computed, sums are not yet.

    `normed`: squared norms of parameters that are not among the recorded ones, by group of `clip`. `real`: how
    many of the B rows are samples, the first ones; the others are padding. `weights`: factors, (B,), to be taken
    instead of those that follow from norms, which are not computed then.
    """

    def __init__(
        self,
        recorded: Recorded,
        *,
        normed: Sequence[Normed] = (),
        rules: PathRules,
        clip: ClipRule,
        mean: bool,
        groups: RowGroups = EACH_ROW,
        loss_scale: float | Tensor,
        real: int | Tensor | None = None,
        bounds: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.size = _checked_batch_size(recorded, normed)
        self.parameters = [slot.parameter for slot, _ in recorded]
        several = len(clip.bounds) > 1
        self._clip, self._groups = clip, [clip.group_of(slot.name) if several else 0 for slot, _ in recorded]
        self._real, self._bounds = real, bounds
        parts = [uses[0] if len(uses) == 1 else combine_uses(slot, uses, rules) for slot, uses in recorded]
        recorded.clear()  # what was put together need not outlive this
        # Per-sample gradients that are sums over the positions of g take its place.
        summed = {at: g for at, part in enumerate(parts) if (g := part.summed_later) is not None}
        for at, sums in zip(summed, many_bias_sums(list(summed.values())), strict=True):
            parts[at] = Kept(sums)
        self._parts: Combined = [*parts]
        del summed, parts
        device = normed[0][0].device if normed else self.parameters[0].device
        if weights is None:
            self.squared = self._norms(normed, device)
            multiplier = groups.multiplier(self.size, mean=mean) / loss_scale  # the mean is over all rows, padding too
            self.clipping = clip_factors(self.squared, clip, multiplier, real, bounds)
        else:
            self._parts = [None if part is None else as_summed(part) for part in self._parts]
            scale = weights.to(device).unsqueeze(0)
            self.clipping = Factors(scale, scale, scale, scale.isfinite()[0])
        self._room = rules.budget.room()
        self._rounding = operand_rounding(device)

    def _norms(self, normed: Sequence[Normed], device: torch.device) -> Tensor:
        """Return squared norms over all parameters, (G, B). Contributions become what is kept from now on."""
        norms = SquaredNorms(len(self._clip.bounds), self.size, device)
        for squared, some in normed:
            norms.add(squared, some)
        norms.add_all(self._parts, self._groups)
        return norms.result()

    def result(self) -> Clipped:
        """Return norms over all groups, factors by row, and what is counted."""
        found, clip = self.clipping, self._clip
        several = len(found.norms) > 1
        return Clipped(
            found.norms.norm(dim=0) if several else found.norms[0],
            found.factors.mT if several else found.factors[0],
            (self.size if self._real is None else self._real) - found.finite.sum(),
            clip.observe(found.norms, found.finite, clip.bounds if self._bounds is None else self._bounds),
        )

    def sums(self, *, into: RunningSum | None, factored: bool, group_bytes: int | None = None) -> Iterator[SumBatch]:
        """Yield the clipped sums: see `sum_parts`."""
        if group_bytes is None:
            group_bytes = self._group_bytes(factored)
        scale = self.clipping.scale
        made = partial(sum_parts, into=into, factored=factored, group_bytes=group_bytes)
        batches = made(self.parameters, self._parts, self._groups, scale)
        while True:
            self._refuse_other_rounding()
            with no_autocast(
                scale.device.type
            ):  # for each batch of sums: the caller's code in between keeps its own mode
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch

    def _refuse_other_rounding(self) -> None:
        """Refuse a change of the products' rounding since the norms were taken: the sums might exceed the bound."""
        if operand_rounding(self.clipping.scale.device) != self._rounding:
            raise UserError(
                "the precision of float32 products was changed between the norms of a micro-batch and its clipped "
                "sums; change it before backward or after the step"
            )

    def _group_bytes(self, factored: bool) -> int:
        """Return how much is summed at once. Kept per-sample gradients come first and free memory for the others."""
        there = [part for part in self._parts if part is not None]
        if True in [part.is_copy for part in there]:
            return LEAST_GROUP_BYTES
        if self._room is None:
            return CPU_GROUP_BYTES if self.clipping.scale.is_cpu else GROUP_BYTES
        kept = [values for part in there if (values := part.values) is not None]
        freed = sum(each.nbytes - (0 if factored else 4 * each[0].numel()) for each in kept if len(each))
        return int(min(GROUP_BYTES, max(LEAST_GROUP_BYTES, self._room + freed - LEAST_GROUP_BYTES)))

    @cached_property
    def _index(self) -> dict[nn.Parameter, int]:
        return {parameter: index for index, parameter in enumerate(self.parameters)}

    def sums_of(self, parameters: Sequence[nn.Parameter]) -> MadeSums:
        """Return the clipped sums of those parameters that backward has reached, and release their contributions."""
        places = [self._index[parameter] for parameter in parameters if parameter in self._index]
        chosen = [self.parameters[at] for at in places]
        parts = [self._parts[at] for at in places]
        for at in places:
            self._parts[at] = None
        self._refuse_other_rounding()
        with torch.no_grad(), no_autocast(self.clipping.scale.device.type):
            groups = [self._groups[at] for at in places]
            batches = sum_parts(chosen, parts, groups, self.clipping.scale, into=None)
            return dict(pair for batch in batches for pair in batch.items())

    def sums_of_others(self, slots: Sequence[Slot], parts: Combined, into: RunningSum | None) -> Iterator[SumBatch]:
        """Return the clipped sums of parameters whose norms were given, from contributions that were made again."""
        groups = [self._clip.group_of(slot.name) for slot in slots]
        return sum_parts([slot.parameter for slot in slots], parts, groups, self.clipping.scale, into=into)


def sum_parts(
    parameters: list[nn.Parameter],
    parts: Combined,
    groups: Sequence[int],
    scale: Tensor,
    *,
    into: RunningSum | None,
    factored: bool = False,
    group_bytes: int = GROUP_BYTES,
) -> Iterator[SumBatch]:
    """Yield the clipped sums, every parameter once. A batch's parts are taken from `parts` before it is yielded.

    `groups`: of the clipping rule, for each parameter; `scale`: (G, B). `factored`: kept per-sample gradients are
    yielded unchanged, with the factors, so that a fused update may sum them in its own pass. `into`: running sums, to
    which the sums are added. Sums keep the dtype that they were accumulated in, so that noise is added before they are
    rounded to a half-precision parameter's dtype.
    """
    for places in _groups(parameters, parts, group_bytes):
        chosen, rows = [parameters[at] for at in places], [groups[at] for at in places]
        # No variable here holds what the sums are made of while they are handed out.
        yield _sum_group(chosen, parts, places, scale, rows, into=into, factored=factored)


def _groups(parameters: list[nn.Parameter], parts: Combined, group_bytes: int) -> list[list[int]]:
    """Group parameters whose sums are made together. Per-sample gradients that are kept come first."""
    kept = [index for index, part in enumerate(parts) if part is not None and part.values is not None]
    kinds: dict[object, dict[tuple[object, ...], list[int]]] = {}
    for index, part in enumerate(parts):
        if part is not None and part.values is None:
            key = part.launch_key()
            kinds.setdefault(key[:1], {}).setdefault(key, []).append(index)
    sizes = [*map(Tensor.numel, parameters)]
    groups: list[list[int]] = []
    # Those of one launch one after the other.
    for order in (kept, *(list(chain.from_iterable(alike.values())) for alike in kinds.values())):
        first = size = 0
        for at, index in enumerate(order):
            if 4 * size >= group_bytes:
                groups.append(order[first:at])
                first, size = at, 0
            size += sizes[index]
        groups.append(order[first:])
    return [group for group in groups if group]


def _sum_group(
    parameters: list[nn.Parameter],
    parts: Combined,
    places: list[int],
    scale: Tensor,
    rows: list[int],
    *,
    into: RunningSum | None,
    factored: bool,
) -> SumBatch:
    taken = [part for at in places if (part := parts[at]) is not None]
    for at in places:
        parts[at] = None
    kept = [values for part in taken if (values := part.values) is not None]
    if kept and factored:
        return SumBatch(parameters, kept, scale, rows)
    outs = [into(p) if into else None for p in parameters]
    # Whoever takes per-sample gradients as they are has used all sums of a batch before it asks for the next.
    if kept:
        return SumBatch(parameters, kept_sums(kept, scale, rows=rows, outs=outs), None)
    made = taken[0].clipped_sums(taken, scale, rows, outs, let_go_together=factored)
    return SumBatch(parameters, made, None)


def _checked_batch_size(recorded: Recorded, normed: Sequence[Normed]) -> int:
    """Return the number of samples, which all contributions share. Check that no contribution was changed since."""
    for slot, contributions in recorded:
        if slot.parameter.dtype.is_complex:
            refuse_complex(slot.name, slot.parameter)
        for part in contributions:
            part.check_unchanged(slot.name)
    sizes = {squared.shape[1] for squared, _ in normed}
    sizes |= {part.batch_size for _, contributions in recorded for part in contributions}
    if len(sizes) > 1:
        raise UserError(
            f"one backward pass holds forward passes of {sorted(sizes)} samples, which have to be about the same "
            "samples: call backward on each before the next forward pass"
        )
    return sizes.pop()

"""The clipped sums of a micro-batch that is closed, as they are iterated over: of this process, or over all ranks.

They are made of the micro-batch (None without samples) and of checkpointed blocks that run again. All of these run
before a sum is handed out, because no weight may change before that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpscope.flash.checkpointing.block_reruns import Reruns
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.step.microbatch import MadeSums, MicroBatch, RunningSum, SumBatch

# Where blocks run again, sums of what is held are made in pieces of about this size, which frees its x and g.
HELD_GROUP_BYTES = 1 << 27

Slots = Mapping[nn.Parameter, Slot]  # all of the model, in order


def close_sums(
    slots: Slots,
    ranks: Ranks,
    micro: MicroBatch | None,
    again: Reruns,
    into: RunningSum | None,
    *,
    factored: bool,
) -> Iterator[SumBatch]:
    """Return the sums of all trainable parameters. `factored`: as in `MicroBatch.sums`.

    Sums over ranks travel before an update uses them: none is `factored`. Each rank gets its part of each parameter.
    """
    if ranks.several:
        made = again.made(None)
        if not again:
            return _reduce(slots, ranks, micro, made, lambda names: made, into)
        with again.sums(micro, None) as sums_of:
            return iter(list(_reduce(slots, ranks, micro, made, sums_of, into)))
    if micro is None:
        return _zeros(slots, set(), into)
    made = again.made(into)
    if again:
        for batch in micro.sums(into=into, factored=False, group_bytes=HELD_GROUP_BYTES):
            made.update(batch.items())
        with again.sums(micro, into) as sums_of:
            made.update(sums_of(None))
    return _stream(slots, micro, made, into, factored=factored)


def _stream(
    slots: Slots, micro: MicroBatch, made: MadeSums, into: RunningSum | None, *, factored: bool
) -> Iterator[SumBatch]:
    """Yield the sum of every trainable parameter once. `made`: those that are made already."""
    done = {*micro.parameters, *made}
    if made:
        batch = SumBatch(list(made), list(made.values()), None)
        made.clear()  # what is handed out is not held here
        yield batch
        del batch
    yield from micro.sums(into=into, factored=factored)
    yield from _zeros(slots, done, into)


def _zeros(slots: Slots, done: set[nn.Parameter], into: RunningSum | None) -> Iterator[SumBatch]:
    """Yield zero sums of the trainable parameters that no backward pass reached."""
    for parameter in slots:
        if parameter not in done and parameter.requires_grad:
            existing = into(parameter) if into else None
            yield SumBatch([parameter], [torch.zeros_like(parameter) if existing is None else existing], None)


def _reduce(
    slots: Slots,
    ranks: Ranks,
    micro: MicroBatch | None,
    made: MadeSums,
    sums_of_blocks: Callable[[Collection[str] | None], MadeSums],
    into: RunningSum | None,
) -> Iterator[SumBatch]:
    """Yield the sums over all ranks. `made`: those of this rank that are made already."""

    def sums_of(some: Sequence[nn.Parameter]) -> MadeSums:
        again = sums_of_blocks({slots[parameter].name for parameter in some})
        found = {p: sums.pop(p) for sums in (made, again) for p in some if p in sums}
        return found if micro is None else {**found, **micro.sums_of(some)}

    ranks.meet_to_reduce()
    trained = [parameter for parameter in slots if parameter.requires_grad]
    for reduced, sums in ranks.reduction.reduce(trained, sums_of):
        yield SumBatch(reduced, sums, None).added(into)


def one_by_one(batches: Iterator[SumBatch]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, sum) pairs. Each is released when the next one is requested."""
    for parameters, sums, _ in batches:
        parameters.reverse()
        sums.reverse()
        while sums:
            yield parameters.pop(), sums.pop()

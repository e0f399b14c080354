"""The clipped sums of a micro-batch that is closed, as they are iterated over: of this process, or over all ranks.

A closer implements one of the two. It receives the micro-batch (None without samples) and the checkpointed blocks that
run again. All of these run before a sum is handed out, because no weight may change before that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpscope.flash.checkpointing.block_reruns import Reruns
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.ranks.ranks import Alone, Ranks
from dpscope.flash.step.microbatch import MicroBatch, RunningSum, SumBatch
from dpscope.flash.torch_side.autocast import no_autocast

# Where blocks run again, sums of what is held are made in pieces of about this size, which frees its x and g.
HELD_GROUP_BYTES = 1 << 27

Slots = Mapping[nn.Parameter, Slot]  # all of the model, in order


class LocalCloser:
    """Sums of one process."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def sums(
        self, micro: MicroBatch | None, again: Reruns | None, into: RunningSum | None, *, factored: bool
    ) -> Iterator[SumBatch]:
        """Return the sums of all trainable parameters. `factored`: as in `MicroBatch.sums`."""
        if micro is None:
            return self._zeros(set(), into)
        made = SumBatch([], [], None) if again is None else again.made(into)
        if again:
            for batch in micro.sums(into=into, factored=False, group_bytes=HELD_GROUP_BYTES):
                made.extend(batch)
            with again.sums(micro, into) as sums_of:
                made.extend(sums_of(None))
        return self._stream(micro, made, into, factored=factored)

    def _stream(
        self, micro: MicroBatch, made: SumBatch, into: RunningSum | None, *, factored: bool
    ) -> Iterator[SumBatch]:
        """Yield the sum of every trainable parameter once. `made`: those that are made already."""
        done = {id(parameter) for parameter in (*micro.parameters, *made.parameters)}
        if made.parameters:
            yield made
        del made
        yield from micro.sums(into=into, factored=factored)
        yield from self._zeros(done, into)

    def _zeros(self, done: set[int], into: RunningSum | None) -> Iterator[SumBatch]:
        """Yield zero sums of the trainable parameters that no backward pass reached."""
        for parameter in self._slots:
            if id(parameter) not in done and parameter.requires_grad:
                existing = into(parameter) if into else None
                yield SumBatch([parameter], [torch.zeros_like(parameter) if existing is None else existing], None)


class RankCloser:
    """Sums over all ranks. Each rank gets its own part of each parameter."""

    def __init__(self, slots: Slots, ranks: Ranks) -> None:
        self._slots, self._ranks = slots, ranks

    def sums(
        self, micro: MicroBatch | None, again: Reruns | None, into: RunningSum | None, *, factored: bool
    ) -> Iterator[SumBatch]:
        """Return the sums of all trainable parameters. They travel before an update uses them: none is `factored`."""
        made = SumBatch([], [], None) if again is None else again.made(None)
        if not again:
            return self._reduce(micro, made, lambda names: made, into)
        with again.sums(micro, None) as sums_of:
            return iter(list(self._reduce(micro, made, sums_of, into)))

    def _reduce(
        self,
        micro: MicroBatch | None,
        made: SumBatch,
        sums_of_blocks: Callable[[Collection[str] | None], SumBatch],
        into: RunningSum | None,
    ) -> Iterator[SumBatch]:
        device = "cpu" if micro is None else micro.clipping.scale.device.type

        def sums_of(some: Sequence[nn.Parameter]) -> Mapping[nn.Parameter, Tensor]:
            with torch.no_grad(), no_autocast(device):
                again = sums_of_blocks({self._slots[parameter].name for parameter in some})
                found = {**_taken(made, some), **_taken(again, some)}
                return found if micro is None else {**found, **micro.sums_of(some)}

        self._ranks.meet_to_reduce()
        trained = [parameter for parameter in self._slots if parameter.requires_grad]
        for reduced, sums in self._ranks.reduction.reduce(trained, sums_of):
            before = [into(parameter) if into else None for parameter in reduced]
            added = [new if old is None else old.add_(new) for old, new in zip(before, sums, strict=True)]
            yield SumBatch(reduced, added, None)


def make_closer(slots: Slots, ranks: Alone) -> LocalCloser | RankCloser:
    """Return the closer of a model that these processes train."""
    return RankCloser(slots, ranks) if isinstance(ranks, Ranks) else LocalCloser(slots)


def _taken(made: SumBatch, some: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Remove and return the sums of some parameters that are already made."""
    every = dict(zip(made.parameters, made.tensors, strict=True))
    found = {parameter: every.pop(parameter) for parameter in some if parameter in every}
    made.parameters[:], made.tensors[:] = list(every), list(every.values())
    return found


def one_by_one(batches: Iterator[SumBatch]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, sum) pairs. Each is released when the next one is requested."""
    for parameters, sums, _ in batches:
        parameters.reverse()
        sums.reverse()
        while sums:
            yield parameters.pop(), sums.pop()

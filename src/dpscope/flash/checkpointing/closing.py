"""The closing of a micro-batch: its clipped sums as they are iterated over, of this process or over all ranks.

They are made of what is held, of checkpointed blocks that were summed in backward, and of blocks that run again:
forward and backward, and each layer's sum is made where its g arrives. All of these run before a sum is handed out,
because no weight may change before that. Random states, buffers and attributes of the model are put back. If weights
are spread over ranks, all of them gather those of a block that any of them runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.checkpointing.checkpointed_blocks import CheckpointedBlocks, RerunRecorder
from dpscope.flash.checkpointing.recomputation import BlockPass, Left, different, project
from dpscope.flash.gradients.norms import as_summed
from dpscope.flash.gradients.slots import Slot, combine
from dpscope.flash.ranks.ranks import BlockNames
from dpscope.flash.sample_rows.snapshots import untouched
from dpscope.flash.step.microbatch import Combined, MadeSums, MicroBatch, Normed, RunningSum, SumBatch
from dpscope.flash.step.step_state import Recorded
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.torch_side.attributes import temporarily

# Where blocks run again, sums of what is held are made in pieces of about this size, which frees its x and g.
HELD_GROUP_BYTES = 1 << 27

Slots = Mapping[nn.Parameter, Slot]  # all of the model, in order
Numbered = dict[tuple[int, int], BlockPass]  # by a number that is the same on all ranks
TakeLayers = Callable[[Left], None]  # takes what the layers of a block leave


class Closing:
    """Closing of one micro-batch.

    blocks  checkpointed blocks; None if none ever runs again
    passes  backward passes through those whose layers' gradients are not held

    Parameters of `clashing` blocks were used outside their block or in several passes: the norm is that of all uses, so
    these blocks run before norms are taken, and are held.
    """

    def __init__(
        self, engine: Engine, blocks: CheckpointedBlocks | None, passes: Sequence[BlockPass], recorded: Recorded
    ) -> None:
        self._engine, self._ranks = engine, engine.ranks
        self._orders: list[BlockNames] = [{}, {}]  # what any rank runs: before the norms, and for the sums
        self._passes: list[BlockPass] = []
        if blocks is None:
            return
        self._blocks = blocks
        uses = Counter(slot for slot, parts in recorded if parts)
        uses.update(slot for each in passes for slot in each.slots)
        clashing = [each for each in passes if any(uses[slot] > 1 for slot in each.slots)]
        for each in clashing:
            name = next(slot.name for slot in each.slots if uses[slot] > 1)
            blocks.choices.hold_shared(each.index, f"{name} is used elsewhere, too: its norm is that of all uses")
            if not each.keeps_boundary:
                raise UserError(
                    f"{name} is used elsewhere, too, after the sums of its checkpointed block were made, as in no step "
                    "before: use it in the same places in every step, or leave memory_budget at None"
                )
            each.sums = []
        self._passes = [each for each in passes if each not in clashing]
        for each in self._passes:
            if each.sums:
                blocks.choices.apart[each.index] = each.shape
        self._clashing = _numbered(clashing)
        self._own = _numbered([each for each in self._passes if not each.sums])
        names = [
            {
                at: {slot.name for slot in each.slots} | self._ranks.names_inside(each.module)
                for at, each in some.items()
            }
            for some in (self._clashing, self._own)
        ]
        self._orders = self._ranks.agree_on_blocks(names)

    @property
    def normed(self) -> list[Normed]:
        """Squared norms of the blocks whose layers' gradients are not held."""
        return [(each.norms, each.groups) for each in self._passes if each.norms is not None]

    @property
    def sensitivity(self) -> float:
        """The largest sensitivity of sums that were made in backward: the rule's bounds may have changed since."""
        return max((each.sensitivity for each in self._passes if each.sums), default=0.0)

    def hold_clashing(self, recorded: Recorded) -> None:
        """Run the clashing blocks, and add what their layers leave to what is recorded."""
        if not self._orders[0]:
            return
        held = dict(recorded)

        def hold(left: Left) -> None:
            for slot, contributions in left.items():
                held[slot].extend(contributions)

        with self._running(self._clashing, None) as run:
            for number, names in self._orders[0].items():
                run(number, names, hold)

    def sums(
        self, slots: Slots, micro: MicroBatch | None, into: RunningSum | None, *, factored: bool
    ) -> Iterator[SumBatch]:
        """Return the sums of all trainable parameters, those of `micro` (None without samples) among them.

        `factored`: as in `MicroBatch.sums`. Sums over ranks travel before an update uses them: none is `factored`. Each
        rank gets its part of each parameter.
        """
        again = bool(self._orders[1])  # a block is to run again for its sums, on any rank
        if self._ranks.several:
            made = self._made(None)
            if not again:
                return self._reduce(slots, micro, made, lambda names: made, into)
            with self._sums_again(micro, None) as sums_of:
                return iter(list(self._reduce(slots, micro, made, sums_of, into)))
        if micro is None:
            return _zeros(slots, set(), into)
        made = self._made(into)
        if again:
            for batch in micro.sums(into=into, factored=False, group_bytes=HELD_GROUP_BYTES):
                made.update(batch.items())
            with self._sums_again(micro, into) as sums_of:
                made.update(sums_of(None))
        return _stream(slots, micro, made, into, factored=factored)

    def _made(self, into: RunningSum | None) -> MadeSums:
        """Return the sums that were made in backward, added to running sums."""
        passes, self._passes = self._passes, []
        return dict(pair for each in passes for batch in each.sums for pair in batch.added(into).items())

    def _reduce(
        self,
        slots: Slots,
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

        self._ranks.meet_to_reduce()
        trained = [parameter for parameter in slots if parameter.requires_grad]
        for reduced, sums in self._ranks.reduction.reduce(trained, sums_of):
            yield SumBatch(reduced, sums, None).added(into)

    # -- blocks that run again ---------------------------------------------------------------------------------------

    @contextmanager
    def _sums_again(self, micro: MicroBatch | None, into: RunningSum | None) -> Iterator[Callable[..., MadeSums]]:
        """Give a function that runs the blocks of some parameters (all, if none are given) and returns their sums."""
        waiting = dict(self._orders[1])
        found: MadeSums = {}

        def add_up(left: Left) -> None:
            assert micro is not None
            rules, slots = self._engine.path_rules, list(left)
            parts: Combined = [as_summed(combine(each, slot.parameter.dtype, rules)) for slot, each in left.items()]
            left.clear()
            for batch in micro.sums_of_others(slots, parts, into):
                found.update(batch.items())

        with self._running(self._own, None if micro is None else micro.clipping.finite) as run:

            def of(names: Collection[str] | None = None) -> MadeSums:
                for number in [n for n, inside in waiting.items() if names is None or not inside.isdisjoint(names)]:
                    run(number, waiting.pop(number), add_up)
                return found

            yield of

    @contextmanager
    def _running(
        self, passes: Numbered, finite: Tensor | None
    ) -> Iterator[Callable[[tuple[int, int], Collection[str], TakeLayers], None]]:
        """Give a function that runs a block by its number; then refuse blocks that gave their layers other gradients.

        Only other ranks run a block that is not in `passes`. `finite`: samples that have a share, if known.
        """
        finished: list[tuple[BlockPass, dict[str, Tensor]]] = []
        engine, name_of = self._engine, self._blocks.choices.name
        with ExitStack() as stack:
            for first in list(passes.values())[:1]:
                self._blocks.refuse_changes(first)
                stack.enter_context(temporarily(engine.forwards, rerunning=True))
                stack.enter_context(engine.state.expecting(engine.groups.row_count(first.batch_size)))
                stack.enter_context(untouched(engine.model))
                anchor = stack.enter_context(engine.anchor.renewed())

            @torch.no_grad()
            def run(number: tuple[int, int], names: Collection[str], use: TakeLayers) -> None:
                with self._ranks.whole_weights(names):
                    if (each := passes.get(number)) is None:
                        return
                    recorder = RerunRecorder(engine, each.slots, each.products)
                    with recorder.entered():
                        each.run_again(anchor, name_of(each.index))
                        finished.append((each, project(recorder.left)))
                        use({slot: recorder.left.pop(slot) for slot, parts in list(recorder.left.items()) if parts})

            yield run
        before = [each.fingerprint for each, _ in finished if each.fingerprint is not None]
        differing = different(before, [projected for _, projected in finished], finite) if finished else []
        if True in differing:
            refused, _ = finished[differing.index(True)]
            raise UserError(
                f"the checkpointed block {name_of(refused.index)} gave its layers other gradients or inputs when it "
                "was run again at the step: return all tensors that the loss uses from the block, or leave "
                "memory_budget at None (docs/sharp-edges.md#block-that-does-not-repeat)"
            )


def _numbered(passes: Sequence[BlockPass]) -> Numbered:
    """Return the passes by number, alike on all ranks: the block's place in the forward, and its how-many-th pass."""
    seen: Counter[int] = Counter()
    found = {}
    for each in passes:
        seen[each.index] += 1
        found[each.index, seen[each.index]] = each
    return found


def _stream(
    slots: Slots, micro: MicroBatch, made: MadeSums, into: RunningSum | None, *, factored: bool
) -> Iterator[SumBatch]:
    """Yield the sum of every trainable parameter once. `made`: those that are made already."""
    done = {*map(id, micro.parameters), *map(id, made)}
    if made:
        batch = SumBatch(list(made), list(made.values()), None)
        made.clear()  # what is handed out is not held here
        yield batch
        del batch
    yield from micro.sums(into=into, factored=factored)
    yield from _zeros(slots, done, into)


def _zeros(slots: Slots, done: set[int], into: RunningSum | None) -> Iterator[SumBatch]:
    """Yield zero sums of the trainable parameters that no backward pass reached. `done`: ids of the others."""
    for key, parameter in zip(map(id, slots), slots, strict=True):
        if key not in done and parameter.requires_grad:
            existing = into(parameter) if into else None
            yield SumBatch([parameter], [torch.zeros_like(parameter) if existing is None else existing], None)

"""Checkpointed blocks run again when a micro-batch is closed: their layers' contributions are summed where they arrive.

No weight changes before the last block has run: sums are handed out afterwards. Random states, buffers and attributes
of the model are put back. If the model is sharded, all ranks gather the weights of a block that any of them runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.checkpointing.block_choices import BlockChoices
from dpscope.flash.checkpointing.recomputation import BlockInput, BlockPass, ForwardState, Left, different, project
from dpscope.flash.gradients.combination import combine
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.norms import as_summed
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.ranks.ranks import BlockNames
from dpscope.flash.sample_rows.snapshots import untouched
from dpscope.flash.step.microbatch import MadeSums, MicroBatch, RunningSum
from dpscope.flash.step.step_state import Recorded
from dpscope.flash.taps.recorder import Engine, Recorder
from dpscope.random_states import cuda_devices, is_same_state, state_of_numpy

TakeLayers = Callable[[Left], None]  # takes what the layers of a block leave
Finished = tuple[BlockPass, dict[str, Tensor]]  # a block that ran again, with the projections of its layers


class Reruns:
    """Blocks to run again in one closing: of this process, or of any rank over which the model is sharded.

    blocks  what runs them; None if no block ever runs again

    Parameters of `clashing` blocks were used outside their block or in several passes: the norm is that of all uses, so
    these blocks run before norms are taken, and are held.
    """

    def __init__(self, blocks: BlockReruns | None, passes: list[BlockPass], recorded: Recorded) -> None:
        self.passes: list[BlockPass] = []
        self._summed: list[BlockPass] = []
        self._orders: list[BlockNames] = [{}, {}]
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
        self.passes = [each for each in passes if each not in clashing]
        self._summed = [each for each in self.passes if each.sums]
        for each in self._summed:
            blocks.choices.apart[each.index] = each.shape
        self._clashing = _numbered(clashing)
        self._own = _numbered([each for each in self.passes if not each.sums])
        inside = blocks.engine.ranks.names_inside
        names = [
            {at: {slot.name for slot in each.slots} | inside(each.module) for at, each in some.items()}
            for some in (self._clashing, self._own)
        ]
        self._orders = blocks.engine.ranks.agree_on_reruns(names)

    def __bool__(self) -> bool:
        """Return True if a block is to run again for its sums, on any rank."""
        return bool(self._orders[1])

    @property
    def sensitivity(self) -> float:
        """The largest sensitivity of sums that were made in backward: the rule's bounds may have changed since."""
        return max((each.sensitivity for each in self._summed), default=0.0)

    def made(self, into: RunningSum | None) -> MadeSums:
        """Return the sums that were made in backward, added to running sums."""
        summed, self._summed = self._summed, []
        return dict(pair for each in summed for batch in each.sums for pair in batch.added(into).items())

    def hold_clashing(self, recorded: Recorded) -> None:
        """Run the clashing blocks, and add what their layers leave to what is recorded."""
        if not self._orders[0]:
            return
        held = dict(recorded)

        def hold(left: Left) -> None:
            for slot, contributions in left.items():
                held[slot].extend(contributions)

        with self._blocks.running(list(self._clashing.values()), None) as run:
            for number, names in self._orders[0].items():
                run(self._clashing.get(number), names, hold)

    @contextmanager
    def sums(self, micro: MicroBatch | None, into: RunningSum | None) -> Iterator[Callable[..., MadeSums]]:
        """Give a function that runs the blocks of some parameters (all, if none are given) and returns their sums."""
        waiting = dict(self._orders[1])
        found: MadeSums = {}

        def add_up(left: Left) -> None:
            assert micro is not None
            rules = self._blocks.engine.path_rules
            slots = list(left)
            parts = [as_summed(combine(each, slot.parameter.dtype, rules)) for slot, each in left.items()]
            left.clear()
            for batch in micro.sums_of_others(slots, parts, into):
                found.update(batch.items())

        with self._blocks.running(list(self._own.values()), None if micro is None else micro.clipping.finite) as run:

            def of(names: Collection[str] | None = None) -> MadeSums:
                for number in [n for n, inside in waiting.items() if names is None or not inside.isdisjoint(names)]:
                    run(self._own.get(number), waiting.pop(number), add_up)
                return found

            yield of


def _numbered(passes: Sequence[BlockPass]) -> dict[tuple[int, int], BlockPass]:
    """Return the passes by number, alike on all ranks: the block's place in the forward, and its how-many-th pass."""
    seen: Counter[int] = Counter()
    found = {}
    for each in passes:
        seen[each.index] += 1
        found[each.index, seen[each.index]] = each
    return found


class RerunRecorder(Recorder):
    """Recorder of a block that runs again for the parameters `slots`."""

    sums_at_once = True

    def __init__(self, engine: Engine, slots: Sequence[Slot]) -> None:
        super().__init__(engine)
        self.left: Left = {slot: [] for slot in slots}
        self.wanted = frozenset(slots)

    def add(self, slot: Slot, contribution: Contribution) -> None:
        if slot in self.left:  # layers that backward came to when it had left the block are held
            self.left[slot].append(contribution)


class BlockReruns:
    """Reruns of checkpointed blocks."""

    def __init__(self, engine: Engine, choices: BlockChoices) -> None:
        self.engine = engine
        self.choices = choices
        self.devices = cuda_devices(engine.model)
        self.is_running = False
        self._weights: list[tuple[nn.Parameter, int]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._rounding = 0.0
        self._numpy_state: Any = None  # where the micro-batch's forward began
        self._draws_from_numpy = True

    def begin_micro_batch(self) -> None:
        self._numpy_state = state_of_numpy()

    def note_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockInput:
        """Return a block's input when backward runs it. Forward ran it before, and may have drawn random numbers."""
        state = ForwardState.now(self.devices, numpy_state=self._draws_from_numpy)
        return BlockInput.of(args, kwargs, state)

    def note_model(self) -> None:
        """Note weights, modes and precision before a micro-batch's first rerun: they must not change."""
        self._weights = [(p, p._version) for p in self.engine.parameters]
        self._modes = [(module, module.training) for module in self.engine.model.modules()]
        self._rounding = self._rounding_now()
        self._draws_from_numpy = not is_same_state(self._numpy_state, state_of_numpy())

    def _rounding_now(self) -> float:
        return operand_rounding(next(iter(self.engine.parameters)).device)

    @contextmanager
    def running(
        self, passes: Sequence[BlockPass], finite: Tensor | None
    ) -> Iterator[Callable[[BlockPass | None, Collection[str], TakeLayers], None]]:
        """Give a function that runs one of the blocks; then refuse blocks that gave their layers other gradients.

        The function takes None where only other ranks run the block. `finite`: samples that have a share, if known.
        """
        finished: list[Finished] = []
        with ExitStack() as stack:
            anchor = self._begin(passes, stack) if passes else None

            def run(each: BlockPass | None, names: Collection[str], use: TakeLayers) -> None:
                with self.engine.ranks.whole_weights(names):
                    if each is not None and anchor is not None:
                        finished.append((each, self._run_one(each, use, anchor)))

            yield run
        if finished:
            self._compare(finished, finite)

    def _begin(self, passes: Sequence[BlockPass], stack: ExitStack) -> Tensor:
        engine = self.engine
        self._refuse_changes(passes[0])
        stack.callback(self._end)
        self.is_running = engine.forwards.rerunning = True
        stack.enter_context(engine.state.expecting(engine.groups.row_count(passes[0].batch_size)))
        stack.enter_context(untouched(engine.model))
        return stack.enter_context(engine.anchor.renewed())

    def _end(self) -> None:
        engine = self.engine
        self.is_running = engine.forwards.rerunning = False

    def _compare(self, finished: list[Finished], finite: Tensor | None) -> None:
        before = [each.fingerprint for each, _ in finished if each.fingerprint is not None]
        differing = different(before, [projected for _, projected in finished], finite)
        if True in differing:
            refused, _ = finished[differing.index(True)]
            raise UserError(
                f"the checkpointed block {self.choices.name(refused.index)} gave its layers other gradients or "
                "inputs when it was run again at the step: return all tensors that the loss uses from the block, or "
                "leave memory_budget at None (docs/sharp-edges.md#block-that-does-not-repeat)"
            )

    @torch.no_grad()
    def _run_one(self, each: BlockPass, use: TakeLayers, anchor: Tensor) -> dict[str, Tensor]:
        """Run one block again and return the projections of its layers' inputs and gradients."""
        recorder = RerunRecorder(self.engine, each.slots)
        with recorder.entered():
            each.run_again(anchor, self.choices.name(each.index))
        projected = project(recorder.left)
        use({slot: recorder.left.pop(slot) for slot, parts in list(recorder.left.items()) if parts})
        return projected

    def _refuse_changes(self, each: BlockPass) -> None:
        modes_changed = any(module.training != training for module, training in self._modes)
        rounds_otherwise = self._rounding != self._rounding_now()
        if modes_changed or rounds_otherwise or any(p._version != version for p, version in self._weights):
            raise UserError(
                "a weight, train() or eval(), or the precision of float32 products was changed between backward and "
                f"the optimizer step, which runs {self.choices.name(each.index)} again under this memory_budget; "
                "change it after the step (docs/sharp-edges.md#changes-between-backward-and-step)"
            )

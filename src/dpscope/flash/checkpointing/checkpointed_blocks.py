"""Checkpointed blocks under a memory budget: their layers' contributions are held, or recomputed later.

The norms of a recomputed block are taken when backward leaves it, and x and g of its layers are released. Its
input and the gradients of its outputs stay. Once the factors are known it runs forward and backward again
(block_reruns.py), and each layer's sum is made where its g arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from dpscope.flash.checkpointing.block_choices import BlockChoices
from dpscope.flash.checkpointing.block_reruns import BlockReruns
from dpscope.flash.checkpointing.recomputation import BlockPass, Fingerprint, gradient_of, module_of
from dpscope.flash.gradients.combination import combine
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.norms import SquaredNorms
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.padding.rows import Rows
from dpscope.flash.step.microbatch import MicroBatch
from dpscope.flash.step.step_state import Recorded
from dpscope.flash.taps.recorder import Engine, Recorder
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import in_backward
from dpscope.flash.torch_side.checkpoint_calls import can_be_watched, watching

_PLAIN = (bool, int, float, str, type(None))  # what a block may give back besides tensors
_unsafe_view = torch.ops.aten._unsafe_view.default


class BlockEngine(Engine, Protocol):
    """Interface of the engine that the blocks belong to."""

    def micro_batch(self, recorded: Recorded, rows: Rows | None, *, groups: Sequence[int]) -> MicroBatch: ...


@dataclass(eq=False)
class CheckpointedBlock(Recorder):
    """One call of torch.utils.checkpoint.checkpoint in a forward pass; stands for the function that it was given.

    It is the recorder of the layers that run in it.
    """

    sums_at_once = True

    blocks: CheckpointedBlocks
    index: int
    function: Callable[..., Any]
    reentrant: bool
    places: list[int] = field(default_factory=list)
    must_hold: bool = False
    open: BlockPass | None = None  # the last backward pass through it, if that is to be run again
    keeps: bool = True  # its layers may keep per-sample gradients

    def __post_init__(self) -> None:
        super().__init__(self.blocks.engine)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.entered():
            if in_backward():
                self.blocks.flush(but=self.open)
                if self.open is not None and self.open.keeps_boundary:
                    self.open.input = self.blocks.reruns.note_input(args, kwargs)
                    if self.open.is_measured:
                        with self.blocks.measuring(self.open):
                            return self.function(*args, **kwargs)
            return self.function(*args, **kwargs)

    def add(self, slot: Slot, contribution: Contribution) -> None:
        self.blocks.choices.note_layer(self.index, slot.module)
        if not self.blocks.gather(self.open, slot, contribution):
            super().add(slot, contribution)

    def receive(self, outputs: Any, given: tuple[Any, ...]) -> Any:
        """Return the block's outputs, with their gradients watched."""
        leaves, spec = pytree.tree_flatten(outputs)
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        storages = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)}
        if any(leaves[at].untyped_storage().data_ptr() in storages for at in self.places):
            self.blocks.hold(self, "it gives back what it is given")
        elif not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            self.blocks.hold(self, "it gives back objects that may hide tensors")
        elif self.places:
            for at, leaf in zip(self.places, Boundary.apply(self, *(leaves[at] for at in self.places)), strict=True):  # type: ignore[no-untyped-call]
                leaves[at] = leaf
            return pytree.tree_unflatten(leaves, spec)
        return outputs


class BetweenBlocks(Recorder):
    """Recorder of layers outside of checkpointed blocks."""

    sums_at_once = True

    def __init__(self, blocks: CheckpointedBlocks) -> None:
        super().__init__(blocks.engine)
        self.blocks = blocks

    def add(self, slot: Slot, contribution: Contribution) -> None:
        self.blocks.flush()
        super().add(slot, contribution)


class Boundary(torch.autograd.Function):
    """Identity at the end of a block: all gradients that its outputs receive pass through it before any layer."""

    @staticmethod
    def forward(ctx: Any, block: CheckpointedBlock, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.block = block
        ctx.set_materialize_grads(False)
        return tuple(_unsafe_view(output, output.shape) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.block.blocks.begin_backward(ctx.block, grads)
        return None, *grads


class CheckpointedBlocks:
    """Checkpointed blocks of an engine's model."""

    def __init__(self, engine: BlockEngine) -> None:
        self.engine = engine
        self.choices = BlockChoices(engine.path_rules.budget)
        self.reruns = BlockReruns(engine, self.choices)
        self._calls = 0  # of this micro-batch
        self._trained: int | None = None  # parameters, in this micro-batch
        self._members: dict[int, set[Slot]] | None = None  # of the clipping rule's groups, in this micro-batch
        self._passes: list[BlockPass] = []
        self._gathering: BlockPass | None = None
        self._is_norming = False
        engine.state.when_dropped(self.clear)

    @property
    def _block(self) -> CheckpointedBlock | None:
        """The block whose layers run now."""
        return self.engine.recorder if isinstance(self.engine.recorder, CheckpointedBlock) else None

    def runs_again(self) -> bool:
        """Return whether layers that ask for their path are in a block that runs again for its sums, or is to."""
        block = self._block
        keeps = block is None or (block.open is None and block.keeps)
        return self.reruns.is_running or self._is_norming or not keeps

    # -- forward -----------------------------------------------------------------------------------------------------

    def watching(self) -> AbstractContextManager[None]:
        """Note checkpointed blocks of this engine's model inside the context."""
        if can_be_watched():
            return watching(self._call)
        self.choices.hold(0, "this version of torch does not tell of its checkpoints: what their layers leave is held")
        return nullcontext()

    def begin_micro_batch(self) -> None:
        self._calls = 0
        self._trained = self._members = None
        self.choices.begin_micro_batch()
        self.reruns.begin_micro_batch()

    def _call(self, checkpoint: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outer = self._block
        if outer is not None:
            self.hold(outer, "it holds a checkpoint of its own")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        planned = dry_run.current() is not None
        transformed = any(
            torch._C._functorch.maybe_get_level(tensor) > 0 or (isinstance(tensor, FakeTensor) and not planned)
            for tensor in tensors
        )
        if outer is not None or transformed or not torch.is_grad_enabled():
            return checkpoint(function, *args, **kwargs)
        reentrant = kwargs.get("use_reentrant") in (None, True)
        block = CheckpointedBlock(self, self._calls, function, reentrant=reentrant)
        self._calls += 1
        if self.engine.ranks.sharded and module_of(function) is None:
            self.hold(block, "its weights are sharded, and a function does not tell which: checkpoint a module")
        held_by_function = [getattr(function, name, None) for name in ("args", "keywords")]  # a partial call's
        return block.receive(checkpoint(block, *args, **kwargs), (args, kwargs, held_by_function))

    def hold(self, block: CheckpointedBlock, why: str) -> None:
        block.must_hold = True
        self.choices.hold(block.index, why)

    # -- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, block: CheckpointedBlock, grads: tuple[Tensor | None, ...]) -> None:
        """Note that a backward pass reaches the block."""
        self.flush()
        before, block.open = block.open, None
        # The parameters' gradients of a reentrant checkpoint are asked for in a backward pass of its own, always.
        if block.must_hold or not (block.reentrant or self.engine.anchor.is_recording()):
            return
        self.engine.path_rules.budget.begin_backward()
        samples, shape = self.engine.state.size_in_backward or 0, self._shape(grads)
        if self._has_groups and self.choices.sum_at_once(block.index):
            apart = self.choices.apart.get(block.index) == shape
            self._begin_pass(block, before, shape, grads, summed=True, keeps_boundary=not apart)
            return
        if self.choices.is_held(block.index, samples, shape, self._calls):
            block.keeps = self.choices.keeps(block.index, samples)
            return
        self._begin_pass(block, before, shape, grads).is_measured = not self.choices.knows(block.index, samples, shape)

    def _begin_pass(
        self, block: CheckpointedBlock, before: BlockPass | None, shape: Any, grads: Any, **options: Any
    ) -> BlockPass:
        block.open = each = BlockPass(block.index, block.function, block.places, grads, **options)
        each.shape = shape
        if not self._passes:
            self.reruns.note_model()
        each.input = before.input if before is not None else None  # torch may run it once for several passes
        self._passes.append(each)
        return each

    @property
    def _has_groups(self) -> bool:
        """True if the clipping rule may have groups that lie inside a block. A shard's sums are made at the closing."""
        return len(self.engine.clip.bounds) > 1 and not self.engine.ranks.sharded

    def _shape(self, grads: Sequence[Tensor | None]) -> Any:
        """Return what a block's memory for a sample depends on: the shapes of its outputs, and the trained layers."""
        if self._trained is None:
            self._trained = sum(p.requires_grad for p in self.engine.parameters)
        return self._trained, [None if grad is None else grad.shape[1:] for grad in grads]

    @contextmanager
    def measuring(self, each: BlockPass) -> Iterator[None]:
        """Measure how much memory the block's forward adds when backward runs it."""
        before = self.engine.path_rules.budget.allocated()
        try:
            yield
        finally:  # a checkpoint may end the run where nothing more is needed of it
            now = self.engine.path_rules.budget.allocated()
            if before is not None and now is not None:
                each.activations = max(0, now.current - before.current)

    def gather(self, gathering: BlockPass | None, slot: Slot, contribution: Contribution) -> bool:
        """Take the contribution, if its block needs it. Return False if it is to be held."""
        self.flush(but=gathering)
        if gathering is None or not gathering.is_open:
            return False
        self._gathering = gathering
        self.engine.state.record(slot)
        gathering.gathered.setdefault(slot, []).append(contribution)
        return True

    @torch.no_grad()
    def flush(self, but: BlockPass | None = None) -> None:
        """Take the norms of the block that backward has left, and free the contributions of its layers.

        but: a pass that backward may still be in
        """
        if self._gathering is None or self._gathering is but:
            return
        done, self._gathering = self._gathering, None
        done.is_open = False
        if done.summed:
            if self._sum_now(done):
                return
            self.choices.recompute_across(done.index)
        if done.input is None:  # backward did not run it again: there is nothing to run it from
            self._passes.remove(done)
            self.choices.hold(done.index, "backward needs nothing of it, and does not run it again")
            for slot, contributions in done.gathered.items():
                for part in contributions:
                    slot.add(part)
            return
        slot, (part, *_) = next(iter(done.gathered.items()))
        device, samples = slot.parameter.device, part.batch_size
        del part
        if done.is_measured:
            self.choices.note_cost(done, samples, self._shape(done.grads))
        self._hold_sums(done)
        clip, rules = self.engine.clip, self.engine.path_rules
        with self._norming(done):
            norms = SquaredNorms(len(clip.bounds), samples, device)
            for slot, contributions in done.gathered.items():
                norms.add_parts(clip.group_of(slot.name), combine(contributions, slot.parameter.dtype, rules))
            done.close(norms.result())

    @contextmanager
    def _norming(self, done: BlockPass) -> Iterator[None]:
        """Take the fingerprint of what the block's layers left; then let several uses take the path of the sum."""
        with no_autocast(next(iter(done.gathered)).parameter.device.type), temporarily(self, _is_norming=True):
            if done.input is not None:
                done.fingerprint = Fingerprint.of(done.gathered, done.dtypes)
            yield

    def _sum_now(self, done: BlockPass) -> bool:
        """Clip and sum what the block's layers left, unless their groups have other layers. Return if it is done."""
        engine = self.engine
        if self._members is None:
            self._members = {}
            for slot in map(engine.slot, engine.parameters):
                if slot.parameter.requires_grad:
                    self._members.setdefault(engine.clip.group_of(slot.name), set()).add(slot)
        groups = sorted({engine.clip.group_of(slot.name) for slot in done.gathered})
        if not all(self._members[group] <= done.gathered.keys() for group in groups):
            return False
        with self._norming(done):
            micro = engine.micro_batch(list(done.gathered.items()), engine.state.rows, groups=groups)
            done.close(micro.squared, groups)
            done.sums = list(micro.sums(into=None, factored=False))
            done.sensitivity = engine.clip.sensitivity()
        return True

    @staticmethod
    def _hold_sums(done: BlockPass) -> None:
        """Hold per-sample sums over positions (biases, norm layers) that are small beside the block's boundary.

        The block need not recompute them, and those of all blocks are normed and summed at once.
        """
        room = (done.input_bytes + done.grad_bytes) // 8
        sums = {slot: parts for slot, parts in done.gathered.items() if not any(part.saved for part in parts)}
        if len(sums) == len(done.gathered):
            return
        for slot, parts in sums.items():
            room -= sum(gradient_of(part).nbytes for part in parts)
            if room < 0:
                return
            del done.gathered[slot]
            for part in parts:
                slot.add(part)

    def clear(self) -> None:
        """Drop the records of the micro-batch's backward passes."""
        self._passes, self._gathering = [], None

    def close(self) -> list[BlockPass]:
        """Take the norms of the backward passes through blocks that are to be run again, and return the passes."""
        self.flush()
        passes, self._passes = self._passes, []
        for each in passes:
            # If no layer of it is trained, its boundary need not be kept the next time.
            if each.norms is None and not each.summed:
                self.choices.note_cost(each, self.engine.state.size_in_backward or 1, self._shape(each.grads))
        return [each for each in passes if each.norms is not None]

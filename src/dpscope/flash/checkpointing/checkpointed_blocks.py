"""Checkpointed blocks under a memory budget: their layers' contributions are held, or recomputed later.

The norms of a recomputed block are taken when backward leaves it, and x and g of its layers are released. Its
input and the gradients of its outputs stay. Once the factors are known it runs forward and backward again
(closing.py), and each layer's sum is made where its g arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from dpscope.errors import UserError
from dpscope.flash.checkpointing.block_choices import BlockChoices
from dpscope.flash.checkpointing.recomputation import (
    BlockInput,
    BlockPass,
    Fingerprint,
    Left,
    bytes_of,
    gradient_of,
    module_of,
)
from dpscope.flash.gradients.contributions import Contribution, Kept
from dpscope.flash.gradients.norms import SquaredNorms
from dpscope.flash.gradients.slots import Slot, combine
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.taps.recorder import Engine, Recorder
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import in_backward
from dpscope.flash.torch_side.checkpoint_calls import can_be_watched, watching
from dpscope.random_states import cuda_devices, is_same_state, state_of_numpy

_PLAIN = (bool, int, float, str, type(None))  # what a block may give back besides tensors
_unsafe_view = torch.ops.aten._unsafe_view.default


@dataclass(eq=False)
class CheckpointedBlock(Recorder):
    """One call of torch.utils.checkpoint.checkpoint in a forward pass; stands for the function that it was given.

    It is the recorder of the layers that run in it.
    """

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
            if not in_backward():
                return self.function(*args, **kwargs)
            self.blocks.flush(but=self.open)
            with self.blocks.rewriting():
                if self.open is not None and self.open.keeps_boundary:
                    self.open.input, self.open.products = self.blocks.note_input(args, kwargs), 0
                    if self.open.is_measured:
                        return self.blocks.measured(self.open, self.function, args, kwargs)
                return self.function(*args, **kwargs)

    @property
    def runs_again(self) -> bool:  # type: ignore[override]
        """True if the block runs again for its sums, or is held in less memory than kept gradients take."""
        return self.open is not None or not self.keeps

    @property
    def sums_at_once(self) -> bool:  # type: ignore[override]
        """True unless the block is summed when backward leaves it: until then x and g of its layers are there."""
        return self.open is None or not self.open.summed

    def add(self, slot: Slot, contribution: Contribution) -> None:
        self.blocks.choices.note_layer(self.index, slot.module)
        blocks, gathering = self.blocks, self.open
        blocks.flush(but=gathering)
        if gathering is None or not gathering.is_open:  # it is held
            super().add(slot, contribution)
            return
        blocks.gathering = gathering
        self.engine.state.record(slot)
        gathering.gathered.setdefault(slot, []).append(contribution)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.open is not None:
            self.open.products += 1
        return super().linear(x, weight, bias)

    def receive(self, outputs: Any, given: Sequence[Tensor]) -> Any:
        """Return the outputs, with their gradients watched. `given`: the tensors among the arguments."""
        leaves, spec = pytree.tree_flatten(outputs)
        self.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        storages = {tensor.untyped_storage().data_ptr() for tensor in given}
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


class RerunRecorder(Recorder):
    """Recorder of a block that runs again for the parameters `slots`.

    The first `products` products are computed. Later ones are zeros, because nothing reads their values: a transformer
    block ends in such a product, a third of its forward.
    """

    sums_at_once = True
    runs_again = True

    def __init__(self, engine: Engine, slots: Sequence[Slot] = (), products: int = 0) -> None:
        super().__init__(engine)
        self.left: Left = {slot: [] for slot in slots}
        self.wanted = frozenset(slots)
        self._products = products

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._products -= 1
        return super().linear(x, weight, bias) if self._products >= 0 else x.new_zeros(*x.shape[:-1], len(weight))

    def add(self, slot: Slot, contribution: Contribution) -> None:
        if slot in self.left:  # layers that backward came to when it had left the block are held
            self.left[slot].append(contribution)


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

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.choices = BlockChoices(engine.path_rules.budget)
        self._devices = cuda_devices(engine.model)
        self._numpy_state: Any = None  # where the micro-batch's forward began
        self._draws_from_numpy = True
        self._before: list[Any] = []  # what must not change between backward and the step: see `_changeable`
        self._calls = 0  # of this micro-batch
        self._trained: int | None = None  # parameters, in this micro-batch
        self._members: dict[int, set[Slot]] | None = None  # of the clipping rule's groups, in this micro-batch
        self._passes: list[BlockPass] = []
        self.gathering: BlockPass | None = None  # in which backward is
        engine.state.when_dropped(self.clear)

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
        self._numpy_state = state_of_numpy()

    def _call(self, checkpoint: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outer = self.engine.recorder if isinstance(self.engine.recorder, CheckpointedBlock) else None
        if outer is not None:
            self.hold(outer, "it holds a checkpoint of its own")
        of_function = [getattr(function, name, None) for name in ("args", "keywords")]  # a partial call's
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, of_function)) if isinstance(leaf, Tensor)]
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
        if module_of(function) is None and self.engine.ranks.gathers_weights:
            self.hold(block, "its weights are sharded, and a function does not tell which: checkpoint a module")
        return block.receive(checkpoint(block, *args, **kwargs), tensors)

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
        # The clipping rule may have groups that lie inside a block. A rank's part of their sums is made at the closing.
        has_groups = len(self.engine.clip.bounds) > 1 and not self.engine.ranks.gathers_weights
        if has_groups and self.choices.sum_at_once(block.index):
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
            self._before = self._changeable()
            self._draws_from_numpy = not is_same_state(self._numpy_state, state_of_numpy())
        if before is not None:  # torch may run it once for several passes
            each.input, each.products = before.input, before.products
        self._passes.append(each)
        return each

    def _changeable(self) -> list[Any]:
        """Return what a block that runs again depends on: versions of weights, modes, precision of products."""
        parameters, modules = self.engine.parameters, self.engine.model.modules()
        rounding = operand_rounding(next(iter(parameters)).device)
        return [rounding, [p._version for p in parameters], [module.training for module in modules]]

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Let a block that runs in backward write into a weight what it holds already: one that forward clamps, say."""
        written = self.engine.verification.written if self._passes else ()
        named = enumerate(self.engine.model.named_parameters() if written else ())
        watched = [(at, p, p._version, p.detach().clone()) for at, (name, p) in named if name in written]
        try:
            yield
        finally:  # a checkpoint may end the run where nothing more is needed of it
            for at, parameter, version, value in watched:
                if torch.equal(parameter, value):
                    self._before[1][at] += parameter._version - version

    def refuse_changes(self, each: BlockPass) -> None:
        """Raise UserError if a block that is about to run again would not do the same."""
        if self._before != self._changeable():
            raise UserError(
                "a weight, train() or eval(), or the precision of float32 products was changed between backward and "
                f"the optimizer step, which runs {self.choices.name(each.index)} again under this memory_budget; "
                "change it after the step (docs/sharp-edges.md#changes-between-backward-and-step)"
            )

    def note_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockInput:
        """Return a block's input when backward runs it. Forward ran it before, and may have drawn random numbers."""
        return BlockInput.of(args, kwargs, self._devices, numpy_state=self._draws_from_numpy)

    def _shape(self, grads: Sequence[Tensor | None]) -> Any:
        """Return what a block's memory for a sample depends on: the shapes of its outputs, and the trained layers."""
        if self._trained is None:
            self._trained = sum(p.requires_grad for p in self.engine.parameters)
        return self._trained, [None if grad is None else grad.shape[1:] for grad in grads]

    def measured(self, each: BlockPass, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the block's function in backward, and measure how much memory that adds."""
        before = self.engine.path_rules.budget.allocated()
        try:
            return function(*args, **kwargs)
        finally:  # a checkpoint may end the run where nothing more is needed of it
            now = self.engine.path_rules.budget.allocated()
            if before is not None and now is not None:
                each.activations = max(0, now.current - before.current)

    def flush(self, but: BlockPass | None = None) -> None:
        """Close the block that backward has left. `but`: a pass that backward may still be in."""
        if self.gathering is not None and self.gathering is not but:
            done, self.gathering = self.gathering, None
            self._close_pass(done)

    @torch.no_grad()
    def _close_pass(self, done: BlockPass) -> None:
        """Take the norms of a block that backward has left, and free the contributions of its layers."""
        done.is_open = False
        if done.summed:
            if self._sum_now(done):
                return
            self.choices.recompute_across(done.index)
            for parts in done.gathered.values():  # what postponed sums are made of is not held
                parts[:] = [part if part.summed_later is None else Kept(part.materialise()) for part in parts]
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
                norms.add_part(clip.group_of(slot.name), combine(contributions, slot.parameter.dtype, rules))
            done.close(norms.result())

    @contextmanager
    def _norming(self, done: BlockPass) -> Iterator[None]:
        """Take the fingerprint of what the block's layers left; then let several uses take the path of the sum."""
        with no_autocast(next(iter(done.gathered)).parameter.device.type), RerunRecorder(self.engine).entered():
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
        room = bytes_of(done.boundary) // 8
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
        self._passes, self.gathering = [], None

    def close(self) -> list[BlockPass]:
        """Take the norms of the backward passes through blocks that are to be run again, and return the passes."""
        self.flush()
        passes, self._passes = self._passes, []
        for each in passes:
            # If no layer of it is trained, its boundary need not be kept the next time.
            if each.norms is None and not each.summed:
                self.choices.note_cost(each, self.engine.state.size_in_backward or 1, self._shape(each.grads))
        return [each for each in passes if each.norms is not None]

"""FlashEngine: exact per-sample clipping (flat, over all layers) with one ordinary loss.backward().

    engine = FlashEngine(model, max_grad_norm=1.0, loss_reduction="mean")
    loss_fn(model(x), y).backward()
    engine.finish()          # p.grad += Σ_b min(1, C / ||v_b||) v_b, for every trainable parameter

Guarantee: with C = `max_grad_norm`, every sample's share of p.grad, over all parameters together, has a norm of at most
C up to rounding; a sample whose gradient is not finite has no share. No noise is added and nothing is divided here.

A micro-batch is everything between two closings: all forward passes before a backward, and all backward passes until
the next forward with gradients enabled (or `finish()`). Row b of each of those forward passes is the same sample b.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpscope.errors import UserError
from dpscope.flash import layers
from dpscope.flash.autocast import SharedCast
from dpscope.flash.block_tails import Tail
from dpscope.flash.checkpointed_blocks import CheckpointedBlock, CheckpointedBlocks
from dpscope.flash.closing import local_sums, no_autocast, one_by_one, reduced_sums, zero_sums
from dpscope.flash.compiled.frames import original_of, refuse_compiled_forwards, require_module
from dpscope.flash.compiled.regions import Region, region_taps
from dpscope.flash.compiled.traced import GraphCast
from dpscope.flash.contributions import Contribution
from dpscope.flash.distributed import ReplicaTap
from dpscope.flash.explanation import OpaqueUnit, PathTable, describe_opaque, explain_slots
from dpscope.flash.forward_passes import BatchSizeOf, ForwardPasses
from dpscope.flash.instance_method import InstanceMethod, instance_method
from dpscope.flash.layers.bare import BareTap
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.memory_budget import MemoryBudget, MemoryLimit
from dpscope.flash.microbatch import MicroBatch, RunningSum, SumBatch
from dpscope.flash.module_state import BufferWatch
from dpscope.flash.padding.rows import PaddingCount, Rows
from dpscope.flash.parameter_hooks import OWN_GRADIENTS, refuse_hooks
from dpscope.flash.paths import FORCEABLE, PathRules
from dpscope.flash.ranks.layout import SHARDED_BLOCKS, refuse_compiled, refuse_shards_inside
from dpscope.flash.ranks.ranks import ranks_of
from dpscope.flash.recomputation import BlockPass
from dpscope.flash.root_taps import RootTap, ZeroGradTap
from dpscope.flash.running_sums import RunningSums
from dpscope.flash.slots import Slot
from dpscope.flash.step_state import Recorded, StepState
from dpscope.flash.taps import LayerTap

LOSS_REDUCTIONS = ("mean", "sum")
NO_SUMS = SumBatch([], [], None)


class FlashEngine:
    """Attached to `model` from construction until `detach()` or the end of a `with` block.

    loss_reduction   how the loss combines samples: their mean or their sum
    path             forces "gram", "direct" or "keep" for every layer (tests); None lets the cost model choose
    memory_budget    how much may be held so that a step is faster: None (as much as ordinary training would at its
                     peak), a number of bytes on a CUDA device, or "lean" (nothing more than has to be). With either
                     of the last two, checkpointed blocks may run again instead of holding what their layers leave
    batch_size_of    (args, kwargs) of the root's forward -> number of samples, if not dim 0 of the first tensor; also
                     asked for layers that are called outside of the root's forward, which it allows: row b is sample b
    loss_scale       what the loss was multiplied by before backward (a GradScaler's scale): a number, a 0-dimensional
                     tensor, or a callable that gives one
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_grad_norm: float,
        loss_reduction: str = "mean",
        path: str | None = None,
        memory_budget: MemoryLimit = None,
        batch_size_of: BatchSizeOf | None = None,
        loss_scale: float | Tensor | Callable[[], float | Tensor] = 1.0,
    ) -> None:
        if loss_reduction not in LOSS_REDUCTIONS:
            raise UserError(f"loss_reduction must be one of {', '.join(LOSS_REDUCTIONS)}, not {loss_reduction!r}")
        if path is not None and path not in FORCEABLE:
            raise UserError(f"path must be one of {', '.join(FORCEABLE)} or None, not {path!r}")
        require_module(model)
        self.ranks = ranks_of(model)
        self._given = model if self.ranks is None else self.ranks.module  # perhaps compiled
        self.model = model = original_of(self._given)
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        sharded = self.ranks is not None and self.ranks.layout.mesh is not None
        budget = MemoryBudget(memory_budget, list(model.parameters()))
        self.path_rules = PathRules(path, budget, sharded=sharded)
        self.loss_scale = loss_scale

        self.state = StepState()
        self.padding = PaddingCount()
        self.cast = SharedCast()
        self.graph_cast = GraphCast()
        self.norms: Tensor | None = None
        self.factors: Tensor | None = None
        self.nonfinite_samples: Tensor | None = None
        self.refusal: type[UserError] = UserError  # raised where a forward pass refuses the model
        self.block: CheckpointedBlock | None = None  # whose layers run now
        self.wanted: Collection[Slot] | None = None  # while a block runs again: the slots that it runs for
        self.tail: Tail | None = None  # while a block runs again
        self._attach(batch_size_of)
        # Stands in for the parameters in autograd's graph: every tapped call has it as an input.
        self._set_anchor(_leaf())
        self._recording = False
        self.blocks: CheckpointedBlocks | None = None
        if memory_budget is not None:  # without one, blocks hold what their layers leave
            self.forwards.blocks = self.blocks = CheckpointedBlocks(self, SHARDED_BLOCKS if sharded else "")

    def _set_anchor(self, anchor: Tensor) -> None:
        self.anchor = anchor
        self._anchor_node = torch.autograd.graph.get_gradient_edge(anchor).node
        self._graph_task = -1

    @contextmanager
    def own_anchor(self) -> Iterator[Tensor]:
        """Inside, taps have an anchor that no graph from before leads to."""
        before = self.anchor
        self._set_anchor(_leaf())
        try:
            yield self.anchor
        finally:
            self._set_anchor(before)

    @property
    def max_grad_norm(self) -> float:
        """C. May be changed at any time: a micro-batch is clipped at what it is when the micro-batch is closed."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"max_grad_norm must be a finite number above 0, not {value}")
        self._max_grad_norm = float(value)

    # -- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self, batch_size_of: BatchSizeOf | None) -> None:
        model = self.model
        if any(instance_method(module) for module in model.modules()):
            raise UserError("the model already has a FlashEngine attached; call its detach() first")
        self._slots: dict[nn.Parameter, Slot] = {}
        for name, parameter in model.named_parameters():
            self._slots[parameter] = Slot(name, parameter, name.rpartition(".")[0])
        refuse_hooks(self._slots.values(), guards=0)
        self._whole: dict[nn.Module, str] = {}  # modules whose own parameters could not be followed, and why
        units = layers.plan(model)
        self.running_sums = RunningSums(self._slots.values())
        self.forwards = ForwardPasses(
            model,
            self.state,
            follow_less=self._follow_less,
            begin_way=self._tap_regions,
            close=lambda: self.finish(),  # noqa: PLW0108  (looked up when called: trainers wrap it)
            abandon=self._abandon_draw,
            batch_size_of=batch_size_of,
            budget=self.path_rules.budget,
            buffers=BufferWatch(model, ()),
            ranks=self.ranks,
        )
        self._taps: list[InstanceMethod] = []
        self._hooks: list[RemovableHandle] = []
        try:
            self._tap(units)
            for slot in self._slots.values():
                self._guard(slot)
        except BaseException:
            self.detach()
            raise

    def _tap(self, units: list[layers.Unit]) -> None:
        refuse_shards_inside((unit.name, unit.module) for unit in units if not unit.followed)
        self.forwards.buffers = BufferWatch(self.model, [unit.module for unit in units if unit.opaque])
        self.forwards.followed = [unit.module for unit in units if unit.followed]
        for unit in units:
            tap = unit.make(self, unit.name, unit.module)
            self._install(tap)
            if isinstance(tap, OpaqueTap) and unit.module in self._whole:
                tap.describe(f"torch.func.vmap over samples, for {self._whole[unit.module]}")
        self._root = RootTap(self, "", self.model)
        self._root.region = Region(self, self._root.original)
        self._install(self._root)
        for region in region_taps(self, self._given, self._root):
            self._install(region)
        self._install(ZeroGradTap(self, "", self.model))
        self._install(ReplicaTap(self.model))
        for tap in self._wrapper_taps():
            self._install(tap)

    def _tap_regions(self) -> None:
        """Modules inside the model may have been compiled after it was made private."""
        if self.ranks is not None:
            refuse_compiled(self.model)
        taps = [tap for tap in self._taps if tap.attribute == "forward"]
        layers_inside = {tap.module for tap in taps if isinstance(tap, LayerTap)}
        refuse_compiled_forwards(self.model, layers_inside, {tap.module for tap in taps} - layers_inside)
        for region in region_taps(self, self.model, self._root):
            if region.root is None:
                self._install(region)

    def _follow_less(self, modules: Sequence[nn.Module], reason: str) -> None:
        """Have modules run sample by sample from now on, for their own parameters cannot be followed.

        With no module given a rehearsal was refused, perhaps for what was taken for samples by its size.
        """
        followed = [tap for tap in self._taps if isinstance(tap, BareTap)]
        if not modules and sum(tap.reconsider() for tap in followed):
            self.forwards.forget()
            return
        modules = modules or [tap.module for tap in followed]
        self._whole.update(dict.fromkeys(modules, reason))
        self._untap()
        self.forwards.forget()
        self._tap(layers.plan(self.model, self._whole))

    @property
    def samples(self) -> int:
        """Those summed since the last zero_grad()."""
        return self.state.samples

    @property
    def pending(self) -> bool:
        """Whether a backward pass has left something that is not summed yet."""
        return self.state.recorded

    @property
    def attached(self) -> bool:
        return bool(self._taps)

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """All parameters of the model, frozen ones too."""
        return self._slots.keys()

    def _install(self, tap: InstanceMethod) -> None:
        tap.install()
        self._taps.append(tap)

    def _guard(self, slot: Slot) -> None:
        """Refuse an ordinary gradient of the parameter before it is added: it came past the taps, and is not clipped.

        The hook holds the parameter's name alone: a parameter that a hook of its own holds is never freed.
        """
        name = slot.name

        def refuse(gradient: Tensor | None) -> None:
            # Autograd passes by without one where a compiled graph holds the parameter.
            if gradient is None or OWN_GRADIENTS.are_taken:
                return
            raise UserError(
                f"{name} received an ordinary, unclipped gradient: it is used outside the forward of the module "
                "that owns it (through torch.nn.functional, or in the loss), in a reentrant checkpoint inside a module "
                "with a parameter of its own (use_reentrant=False mends that), or was frozen when the engine was "
                "attached; call the module instead, give the parameter to a module of its own, or attach a new engine"
            )

        parameter, trainable = slot.parameter, slot.parameter.requires_grad
        if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it can never require a gradient
        parameter.requires_grad_(True)  # hooks can be registered only so; it may be switched on later
        self._hooks.append(parameter.register_hook(refuse))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trainable)

    def _wrapper_taps(self) -> list[InstanceMethod]:
        wrapper = None if self.ranks is None else self.ranks.layout.wrapper
        if self._given is not self.model:
            return [ZeroGradTap(self, "", self._given)]
        return [] if self.ranks is None or wrapper is None else [*self.ranks.taps(), ZeroGradTap(self, "", wrapper)]

    def remove_on_detach(self, hook: RemovableHandle) -> None:
        self._hooks.append(hook)

    def detach(self) -> None:
        """Restore the model. Contributions that were not summed are dropped; gradients stay."""
        self._untap()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.state.drop()

    def _untap(self) -> None:
        for tap in reversed(self._taps):
            tap.restore()
        self._taps = []

    def __enter__(self) -> FlashEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # -- what taps ask -----------------------------------------------------------------------------------------------

    def slot(self, parameter: Tensor | None) -> Slot:
        assert isinstance(parameter, nn.Parameter)
        return self._slots[parameter]

    def add(self, slot: Slot, contribution: Contribution) -> None:
        if self.blocks is not None and self.blocks.add(slot, contribution):
            return
        self.path_rules.budget.begin_backward()
        self.state.record(slot)
        slot.add(contribution)

    def is_recording(self) -> bool:
        """Whether the backward pass that runs is one that accumulates the gradients of parameters.

        It is not in `torch.autograd.grad(loss, x)` and `backward(inputs=[x])`: autograd then passes the anchor by.
        """
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._recording = torch._C._will_engine_execute_node(self._anchor_node)
            self._graph_task = task
            if self._recording:
                self.path_rules.budget.begin_backward()
        return self._recording

    # -- closing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Close the micro-batch: add its clipped sums into p.grad. Every trainable parameter has one afterwards.

        A gradient that is there already has to come from here: any other may hold more than C of a sample.
        """
        sums = self.running_sums
        sums.refuse_other_gradients()
        for parameter, total in one_by_one(self._close(into=sums.get)):
            if sums.get(parameter) is None:
                sums.put(parameter, total)

    def clipped_sums(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Close the micro-batch and give (parameter, Σ_b c_b v_b) one at a time, without touching p.grad.

        Every trainable parameter comes once. Norms and factors are ready when this returns; a layer's x and g are
        freed as its sum is handed out, so the whole gradient need never exist.
        """
        return one_by_one(self._close())

    def factored_sums(self) -> Iterator[SumBatch]:
        """As `clipped_sums`, many at a time, and per-sample gradients that are kept are left to the caller to sum."""
        return self._close(factored=True)

    def _close(self, *, into: RunningSum | None = None, factored: bool = False) -> Iterator[SumBatch]:
        """Close the micro-batch: its norms and factors now, its sums as they are iterated over."""
        refuse_hooks(self._slots.values(), guards=1)
        passes = [] if self.blocks is None else self.blocks.close()
        rows = self.state.rows
        recorded = self.state.close()
        if recorded and self.forwards.is_made_up:
            recorded, passes = [], []  # of a sample that is nobody's
        if not recorded:  # an empty batch, or no backward at all
            if recorded is not None:
                self.state.count()
            self.norms = self.factors = self.anchor.new_zeros(0, dtype=torch.float64)
            if self.ranks is None:
                return zero_sums(self._slots, set(), into)
            return reduced_sums(self.ranks, None, NO_SUMS, self._slots, "cpu", into)
        device = recorded[0][0].parameter.device.type
        with no_autocast(device):
            passes = self.blocks.reruns.separate(passes, recorded) if self.blocks is not None else []
            recorded = [(slot, parts) for slot, parts in recorded if parts]
            micro = self._norm(recorded, passes, rows)
            of_blocks = self._sum_again(passes, micro, into if self.ranks is None else None)
        self.path_rules.budget.close()
        self.state.count(micro.size if rows is None else rows.real, self.max_grad_norm, rows)
        if self.ranks is None:
            return local_sums(micro, of_blocks, self._slots, device, into, factored=factored)
        return reduced_sums(self.ranks, micro, of_blocks, self._slots, device, into)

    @torch.no_grad()
    def _norm(self, recorded: Recorded, passes: list[BlockPass], rows: Rows | None) -> MicroBatch:
        real = None if rows is None else rows.real
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        micro = MicroBatch(
            recorded,
            normed=[each.norms for each in passes if each.norms is not None],
            rules=self.path_rules,
            max_grad_norm=self.max_grad_norm,
            mean=self.loss_reduction == "mean",
            loss_scale=scale,
            real=real,
        )
        if rows is not None:
            self.padding.add(rows)
        self.norms, self.factors = micro.clipping.norms[:real], micro.clipping.factors[:real]
        dropped = (~micro.clipping.finite[:real]).sum()
        self.nonfinite_samples = dropped if self.nonfinite_samples is None else self.nonfinite_samples + dropped
        return micro

    def _sum_again(self, passes: list[BlockPass], micro: MicroBatch, into: RunningSum | None) -> SumBatch:
        """All sums, where checkpointed blocks run again; otherwise none yet."""
        if self.blocks is None or not passes:
            return NO_SUMS
        try:
            return self.blocks.reruns.sums(passes, micro, into)
        except BaseException:
            self.running_sums.clear()  # some of them are there, others are not
            raise

    def zero_grad(self, set_to_none: bool = True) -> bool:
        """Drop what backward has left, and the gradients; inside a logical batch they stay, and the answer is False."""
        cleared = self.state.clear()
        if cleared:
            self.clear_gradients(set_to_none)
        return cleared

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """p.grad of every parameter of the model: zero where it was made here and is to be kept, None otherwise."""
        self.running_sums.clear(set_to_none)

    def _abandon_draw(self) -> None:
        """Drop the sums of a draw whose other parts did not come: two draws in one step may hold a sample twice."""
        warnings.warn(
            "a part of a draw was trained on and the rest left out (a batch skipped, a loop that was left): its sums "
            "are dropped, and no step is taken for it",
            stacklevel=2,
        )
        self.state.complete()
        self.zero_grad()

    def discard(self) -> None:
        """Drop what backward has left and was not summed; gradients stay."""
        self.state.discard()

    # -- looking -----------------------------------------------------------------------------------------------------

    def contributions(self) -> Iterator[tuple[Slot, Contribution]]:
        """Contributions that backward passes have left and that are not summed yet."""
        return ((slot, part) for slot in self._slots.values() for part in slot.contributions)

    def explain(self, *, measured: bool = False) -> PathTable:
        """One row a trainable parameter: which module, what was seen last, which path its norms take, and why.

        `measured`: what each path takes on this device, too, norm and clipped sum of a product of the same shape. That
        trains nothing, and takes memory for one product and a second or so a shape.
        """
        blocks = () if self.blocks is None else self.blocks.choices.rows
        trained = (slot for slot in self._slots.values() if slot.parameter.requires_grad)
        return explain_slots(trained, blocks, str(self.padding) if self.padding.rows else "", measured=measured)

    def opaque_units(self) -> list[OpaqueUnit]:
        """The modules that run sample by sample through torch.func.vmap, the largest first."""
        opaque = {tap.module for tap in self._taps if isinstance(tap, OpaqueTap)}
        return describe_opaque(self.model, ((n, m) for n, m in self.model.named_modules() if m in opaque))


def _leaf() -> Tensor:
    return torch.zeros((), requires_grad=True, device="cpu")

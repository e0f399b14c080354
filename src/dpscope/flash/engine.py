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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from dpscope.errors import UserError
from dpscope.flash import layers
from dpscope.flash.arguments import leaves_in, rows_of, signature
from dpscope.flash.contributions import Contribution, Kept, wide
from dpscope.flash.distributed import ReplicaTap, refuse_ddp_forward, refuse_distributed_model
from dpscope.flash.explanation import Explanation, OpaqueUnit, describe_opaque, explain_slots
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.microbatch import FactoredSum, MicroBatch, RunningSum
from dpscope.flash.module_state import BufferWatch
from dpscope.flash.parameter_hooks import refuse_hooks
from dpscope.flash.paths import DIRECT, FORCEABLE, Decision, choose_path
from dpscope.flash.rehearsal import KEEP_BATCH_FIRST, Rehearsal
from dpscope.flash.rehearsal_run import Run
from dpscope.flash.taps import InstanceMethod, LayerTap, RootTap, SharedCast, Slot, TapOfSamples, ZeroGradTap

LOSS_REDUCTIONS = ("mean", "sum")

BatchSizeOf = Callable[[tuple[Any, ...], dict[str, Any]], int]  # of a call's args and kwargs


class FlashEngine:
    """Attached to `model` from construction until `detach()` or the end of a `with` block.

    loss_reduction   how the loss joins samples: their mean or their sum
    path             forces "gram", "direct" or "keep" for every layer (tests); None lets the cost model choose
    memory_allowance how much more memory than x and g the kept per-sample gradients of a layer may take
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
        memory_allowance: float = 1.0,
        batch_size_of: BatchSizeOf | None = None,
        loss_scale: float | Tensor | Callable[[], float | Tensor] = 1.0,
    ) -> None:
        if loss_reduction not in LOSS_REDUCTIONS:
            raise UserError(f"loss_reduction must be one of {', '.join(LOSS_REDUCTIONS)}, not {loss_reduction!r}")
        if path is not None and path not in FORCEABLE:
            raise UserError(f"path must be one of {', '.join(FORCEABLE)} or None, not {path!r}")
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        self.path = path
        self.memory_allowance = memory_allowance
        self.batch_size_of = batch_size_of
        self.loss_scale = loss_scale

        self.batch_size: int | None = None  # of the micro-batch that is open
        self.pending = False  # a backward pass has left contributions
        self.generation = 0  # counts closings
        self.cast = SharedCast()
        self.samples = 0
        self.micro_batches = 0  # summed since the last step or discard
        self.largest_clip = 0.0  # C of those; the largest, should it have changed in between
        self.accumulating = False  # a logical batch is not complete: zero_grad() keeps the sums in p.grad
        self.forbid_accumulation = False  # a step has one micro-batch: under Poisson sampling it is the whole draw
        self.applied = False  # an optimizer has used the sums, and nobody has cleared them since
        self.norms: Tensor | None = None
        self.factors: Tensor | None = None
        self.nonfinite_samples: Tensor | None = None
        self.refusal: type[UserError] = UserError  # what a model that is refused in forward is told by
        self.run: Run | None = None  # of a rehearsal
        self._depth = 0  # of calls of the root's forward
        self._rehearsed: set[Any] = set()  # ways in which the root was called
        self._unknown: list[tuple[TapOfSamples, int, bool]] = []  # calls of this forward that no rehearsal has seen
        self._touched: list[Slot] = []
        self._written: dict[int, TensorWeakRef] = {}  # gradients that finish() made, by their parameter's id
        # Sums of half-precision parameters stay here in float32 until noise is added, if whoever adds it says so.
        self.wide_sums = False
        self._wide: dict[nn.Parameter, Tensor] = {}
        self._attach()
        # Stands in for the parameters in autograd's graph: every tapped call has it as an input.
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self._graph_task = -1
        self._recording = False

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

    def _attach(self) -> None:
        model = self.model
        if any(isinstance(vars(module).get("forward"), InstanceMethod) for module in model.modules()):
            raise UserError("the model already has a FlashEngine attached; call its detach() first")
        self._slots: dict[nn.Parameter, Slot] = {}
        for name, parameter in model.named_parameters():
            self._slots[parameter] = Slot(name, parameter, name.rpartition(".")[0])
        refuse_distributed_model(model)
        refuse_hooks(self._slots.values(), guards=0)
        units = layers.plan(model)
        self._buffers = BufferWatch(model, [unit.module for unit in units if unit.opaque])
        self._taps: list[InstanceMethod] = []
        self._hooks: list[RemovableHandle] = []
        try:
            for unit in units:
                self._install(unit.make(self, unit.name, unit.module))
            self._install(RootTap(self, model))
            self._install(ZeroGradTap(self, model))
            self._install(ReplicaTap(model))
            for slot in self._slots.values():
                self._guard(slot)
        except BaseException:
            self.detach()
            raise

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
        """An ordinary gradient that reaches a parameter has gone round the taps: it is thrown away, loudly."""

        def refuse(parameter: Tensor) -> None:
            if parameter.grad is None:
                return  # autograd passed by without a gradient
            parameter.grad = None
            raise UserError(
                f"{slot.name} received an ordinary, unclipped gradient: it is used outside the forward of the module "
                "that owns it (through torch.nn.functional, or in the loss), in a reentrant checkpoint inside a module "
                "with a parameter of its own (use_reentrant=False mends that), or was frozen when the engine was "
                "attached; call the module instead, give the parameter to a module of its own, or attach a new engine"
            )

        parameter, trainable = slot.parameter, slot.parameter.requires_grad
        if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it can never require a gradient
        parameter.requires_grad_(True)  # hooks can be registered only so; it may be switched on later
        self._hooks.append(parameter.register_post_accumulate_grad_hook(refuse))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trainable)

    def remove_on_detach(self, hook: RemovableHandle) -> None:
        self._hooks.append(hook)

    def detach(self) -> None:
        """Gives the model back as it was. Contributions that were not summed are dropped; gradients stay."""
        for tap in reversed(self._taps):
            tap.restore()
        for hook in self._hooks:
            hook.remove()
        self._taps, self._hooks = [], []
        self._drop()

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

    def decide(self, batch: int, length: int, d: int, p: int, *, itemsize: int, x_held: int | None = None) -> Decision:
        return choose_path(
            batch,
            length,
            d,
            p,
            itemsize=itemsize,
            forced=self.path,
            memory_allowance=self.memory_allowance,
            x_held=x_held,
        )

    def add(self, slot: Slot, contribution: Contribution) -> None:
        if not self.pending:
            self.note_backward()
        if not slot.contributions:
            self._touched.append(slot)
        elif isinstance(contribution, Kept) and slot.contributions[-1].absorb(contribution, slot.parameter.dtype):
            return
        slot.contributions.append(contribution)

    def is_recording(self) -> bool:
        """Whether the backward pass that runs is one that accumulates the gradients of parameters.

        It is not in `torch.autograd.grad(loss, x)` and `backward(inputs=[x])`: autograd then passes the anchor by.
        """
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._recording = torch._C._will_engine_execute_node(self._anchor_node)
            self._graph_task = task
        return self._recording

    def note_backward(self) -> None:
        """A backward pass has begun; that of an empty batch leaves nothing else."""
        if self.forbid_accumulation and self.micro_batches:
            raise UserError(
                "a second backward pass since the last step, but Poisson sampling makes each batch a whole step: call "
                "optimizer.step() and zero_grad(), use opacus.utils.batch_memory_manager.BatchMemoryManager, or leave "
                "out Poisson sampling with poisson_sampling=False"
            )
        self.pending = True

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The root's forward begins, gradients enabled."""
        refuse_ddp_forward()
        self._close_if_left()
        self.batch_size = self._count(args, kwargs)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples of a call."""
        if self.batch_size_of is not None:
            return self.batch_size_of(args, kwargs)
        leaves = leaves_in((args, kwargs))
        if not leaves:
            raise UserError(
                "the number of samples is not known: there is no tensor in what the model was called with; say it with "
                "batch_size_of (of FlashEngine or make_private), a function of the call's args and kwargs"
            )
        return rows_of(leaves[0])

    def call_root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The root's forward, gradients enabled; the first time it is called in some way it is rehearsed."""
        self.open(args, kwargs)
        outermost = self._depth == 0
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint runs it again
        failure: Exception | None = None
        if outermost and not in_backward and (self.batch_size or 0) > 1:
            way = signature((args, kwargs, self.model.training))
            if way not in self._rehearsed:
                failure = self._rehearse(forward, args, kwargs)
                self._rehearsed.add(way)
        buffers = self._buffers.look()
        self._depth += 1
        try:
            output = forward(*args, **kwargs)
        finally:
            self._depth -= 1
            unknown = self._unknown
            if outermost:
                self._unknown = []
        if outermost and not in_backward:
            changed = self._buffers.changed(buffers)
            if changed:
                self._judge_buffers(changed, forward, args, kwargs)
        if outermost and unknown:
            self._settle(unknown, failure or self._rehearse(forward, args, kwargs))
        return output

    def _judge_buffers(
        self, paths: list[str], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Buffers that forward has changed: would it have changed them in the same way had a sample been another?"""
        seen: list[list[Tensor | None]] = []

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            seen.append(self._buffers.values(paths))
            return output

        if self.batch_size:
            Rehearsal(self, observed, args, kwargs, self.batch_size).run_with_others()
        for index, path in enumerate(paths):
            self._buffers.judge(path, [values[index] for values in seen])

    def _rehearse(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """What kept the rehearsal from being run, if something did."""
        assert self.batch_size is not None
        try:
            Rehearsal(self, forward, args, kwargs, self.batch_size).judge()
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return error
        return None

    def _settle(self, unknown: list[tuple[TapOfSamples, int, bool]], failure: Exception | None) -> None:
        for tap, dim, shared in unknown:
            if dim not in (tap.shared if shared else tap.known):
                reason = f"the forward could not be run again to find out: {failure}" if failure else "it changes"
                raise UserError(
                    f"whether the rows of what {tap.name} was given are the samples is not known ({reason}): "
                    f"{KEEP_BATCH_FIRST}"
                )

    def _close_if_left(self) -> None:
        """A forward outside of backward (checkpointing runs some inside) begins a new micro-batch."""
        if self.pending and torch._C._current_graph_task_id() == -1:
            self.finish()

    def admit(self, tap: LayerTap, x: Tensor) -> Tensor:
        """Check a layer's input where it is not the usual one: a new micro-batch, a broadcast input, a wrong shape."""
        self._close_if_left()
        if torch._C._functorch.maybe_get_level(x) > 0:
            raise UserError(
                f"{tap.name} was called inside a transform of torch.func (vmap, grad), where its samples cannot be "
                "told; call it with the whole batch"
            )
        tap.admit(x)
        batch = self.batch_for(tap, (x,), {})
        size = x.shape[0]
        shared = size == 1 != batch
        if size != batch and not shared:
            raise UserError(
                f"{tap.name} was given a tensor of shape {tuple(x.shape)} in a batch of {batch} samples: "
                f"{KEEP_BATCH_FIRST}"
            )
        self.admit_unit(tap, x.dim(), shared=shared)
        return x.expand(batch, *x.shape[1:]) if shared else x

    def batch_for(self, tap: TapOfSamples, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples, which the root's forward tells; outside of it, `batch_size_of`."""
        self._close_if_left()
        if self._depth == 0 and self.batch_size_of is not None and torch._C._current_graph_task_id() == -1:
            size = self.batch_size_of(args, kwargs)
            if self.batch_size not in (None, size):
                raise UserError(
                    f"{tap.name} was called with {size} samples after a forward pass of {self.batch_size}: forward "
                    "passes before a backward pass are about the same samples"
                )
            self.batch_size = size
        if self.batch_size is None:
            raise UserError(
                f"{tap.name} was called outside of the model's own forward: the number of samples is not known; "
                "call the model itself, or say it with batch_size_of (of FlashEngine or make_private), which is then "
                "asked with the args and kwargs of each layer called so"
            )
        return self.batch_size

    def admit_unit(self, tap: TapOfSamples, dim: int, *, shared: bool) -> None:
        """Lets a call pass whose rows are known to be samples; any other has to be rehearsed after the forward."""
        if self.run is not None or (self.batch_size or 0) < 2 or dim in (tap.shared if shared else tap.known):
            return
        if self._depth:
            self._unknown.append((tap, dim, shared))
        elif self.batch_size_of is None or shared:
            raise UserError(
                f"{tap.name} was called outside of the model's own forward with what was not seen there: whether its "
                "rows are the samples is not known; call the model itself"
            )

    def refuse_parameter(self, module: str, key: str) -> None:
        raise UserError(
            f"{module}.{key} was replaced after the engine was attached; detach the engine and attach a new one"
        )

    def refuse_backward(self, module: str, generation: int) -> None:
        if generation != self.generation:
            raise UserError(
                f"backward reached {module} through a forward pass whose samples are already clipped and summed; call "
                "backward for all losses of a forward pass before the next forward pass and before the step"
            )
        raise UserError("backward(create_graph=True) is not supported: per-sample gradients of gradients are not taken")

    # -- closing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Closes the micro-batch: its clipped sums are added into p.grad. Every trainable parameter has one after.

        A gradient that is there already has to come from here: any other may hold more than C of a sample.
        """
        for slot in self._slots.values():
            if slot.parameter.grad is not None and not self._wrote(slot.parameter):
                raise UserError(
                    f"{slot.name}.grad holds a gradient that flash clipping did not make: clear gradients with "
                    "optimizer.zero_grad() first"
                )
        for parameter, total, _ in self._sums(into=self.running_sum):
            if self.running_sum(parameter) is not None:
                continue
            if self._is_kept_wide(parameter):
                self._wide[parameter] = total.to(wide(parameter.dtype))
            else:
                self._write(parameter, total)

    def running_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """What finish() has added up so far: p.grad, or a float32 tensor where `wide_sums` keeps one."""
        return self._wide.get(parameter) if self._is_kept_wide(parameter) else parameter.grad

    def _is_kept_wide(self, parameter: nn.Parameter) -> bool:
        return self.wide_sums and parameter.dtype in (torch.bfloat16, torch.float16)

    def write_wide_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """The float32 sums, private by now, become p.grad of these parameters, rounded; the others are dropped."""
        for parameter in parameters:
            if parameter in self._wide:
                self._write(parameter, self._wide.pop(parameter))
        self._wide.clear()

    def _write(self, parameter: nn.Parameter, total: Tensor) -> None:
        parameter.grad = gradient = total.to(parameter.dtype)
        self._written[id(parameter)] = TensorWeakRef(gradient)

    def _wrote(self, parameter: nn.Parameter) -> bool:
        reference = self._written.get(id(parameter))
        return reference is not None and reference() is parameter.grad

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """p.grad of every parameter of the model: zero where it was made here and is to be kept, None otherwise."""
        self._wide.clear()
        for parameter in self._slots:
            if parameter.grad is not None:
                if set_to_none or not self._wrote(parameter):
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    def clipped_sums(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Closes the micro-batch and gives (parameter, Σ_b c_b v_b) one at a time, without touching p.grad.

        Every trainable parameter comes once. Norms and factors are ready when this returns; a layer's x and g are
        freed as its sum is handed out, so the whole gradient need never exist.
        """
        return ((parameter, total) for parameter, total, _ in self._sums())

    def factored_sums(self) -> Iterator[FactoredSum]:
        """As `clipped_sums`, with the factor of a lone sample left to the caller: see `MicroBatch.sums`."""
        return self._sums(factored=True)

    def _sums(self, *, into: RunningSum | None = None, factored: bool = False) -> Iterator[FactoredSum]:
        closing = self.pending
        refuse_hooks(self._slots.values(), guards=1)
        if self.batch_size and not closing and not self.micro_batches:
            raise UserError(
                f"there was a forward pass of {self.batch_size} samples, but no backward pass that accumulates the "
                "parameters' gradients: call loss.backward() without inputs=..., and freeze what is not to be trained "
                "with requires_grad_(False); zero_grad() forgets the forward pass"
            )
        slots = self._drop(keep_contributions=True)
        if not slots:  # an empty batch, or no backward at all
            self.micro_batches += closing
            self.norms = self.factors = self.anchor.new_zeros(0, dtype=torch.float64)
            return self._zeros(set(), into)
        device = slots[0].parameter.device.type
        try:
            with _no_autocast(device):
                micro = self._norm(slots)
        except BaseException:
            # What is left in a slot would keep it from being noted as touched, and out of every later step.
            for slot in slots:
                slot.contributions = []
            raise
        self.micro_batches += closing
        return self._iterate(micro, device, into, factored)

    @torch.no_grad()
    def _norm(self, slots: list[Slot]) -> MicroBatch:
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        micro = MicroBatch(
            slots,
            decide=self.decide,
            max_grad_norm=self.max_grad_norm,
            mean=self.loss_reduction == "mean",
            loss_scale=scale,
            lookups_by_sorting=self.path == DIRECT,
        )
        self.norms, self.factors = micro.clipping.norms, micro.clipping.factors
        self.samples += micro.size
        self.largest_clip = max(self.largest_clip, self.max_grad_norm)
        dropped = (~micro.clipping.finite).sum()
        self.nonfinite_samples = dropped if self.nonfinite_samples is None else self.nonfinite_samples + dropped
        return micro

    def _iterate(
        self, micro: MicroBatch, device: str, into: RunningSum | None, factored: bool
    ) -> Iterator[FactoredSum]:
        done = set(map(id, micro.parameters))
        handfuls = micro.sums(into=into, factored=factored)
        del micro
        while True:
            with _no_autocast(device):  # for each handful anew: the caller's code in between keeps its own mode
                handful = next(handfuls, None)
            if handful is None:
                break
            handful.reverse()
            while handful:
                yield handful.pop()
        yield from self._zeros(done, into)

    def _zeros(self, done: set[int], into: RunningSum | None) -> Iterator[FactoredSum]:
        """Trainable parameters that nothing reached."""
        for parameter in self._slots:
            if parameter.requires_grad and id(parameter) not in done:
                existing = into(parameter) if into else None
                yield parameter, torch.zeros_like(parameter) if existing is None else existing, None

    def _drop(self, *, keep_contributions: bool = False) -> list[Slot]:
        """Forgets the open micro-batch; graphs made during it can no longer be run backward."""
        slots, self._touched = self._touched, []
        if not keep_contributions:
            for slot in slots:
                slot.contributions = []
        if self.pending:
            self.generation += 1
        self.pending = False
        self.batch_size = None
        return slots

    def discard(self) -> None:
        """Drops what backward has left and was not summed; counts anew unless `holding`. For zero_grad()."""
        self._drop()
        for slot in self._slots.values():
            if slot.contributions:
                slot.contributions = []
        if not self.accumulating:
            self.samples = self.micro_batches = 0
            self.largest_clip = 0.0

    # -- looking -----------------------------------------------------------------------------------------------------

    def contributions(self) -> Iterator[tuple[Slot, Contribution]]:
        """What backward has left for each parameter and was not summed yet."""
        return ((slot, part) for slot in self._slots.values() for part in slot.contributions)

    def explain(self) -> Explanation:
        """One row a trainable parameter: which module, what was seen last, which path its norms take, and why."""
        return explain_slots(slot for slot in self._slots.values() if slot.parameter.requires_grad)

    def opaque_units(self) -> list[OpaqueUnit]:
        """The modules that run sample by sample through torch.func.vmap, the largest first."""
        opaque = {tap.module for tap in self._taps if isinstance(tap, OpaqueTap)}
        return describe_opaque(self.model, ((n, m) for n, m in self.model.named_modules() if m in opaque))


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    """Norms and sums are taken in the precision of what was recorded, also inside an autocast context."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

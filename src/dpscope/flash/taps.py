"""Taps: what stands in for a module's forward while an engine is attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from dpscope.errors import UserError
from dpscope.flash.arguments import KEEP_BATCH_FIRST
from dpscope.flash.block_tails import Tail
from dpscope.flash.compiled.frames import run_outside
from dpscope.flash.compiled.traced import GraphCast, Handed, call_traced
from dpscope.flash.contributions import Contribution, Kept, Summed
from dpscope.flash.forward_passes import ForwardPasses
from dpscope.flash.instance_method import InstanceMethod
from dpscope.flash.paths import PathRules
from dpscope.flash.rehearsal_run import Run
from dpscope.flash.slots import Slot
from dpscope.flash.stand_in import StandIn
from dpscope.flash.step_state import StepState


class LayerBlock(Protocol):
    """A checkpointed block whose layers are told from others."""

    def running(self) -> AbstractContextManager[None]: ...


class Engine(Protocol):
    """What taps ask of the engine they belong to."""

    model: nn.Module
    state: StepState
    forwards: ForwardPasses
    path_rules: PathRules
    cast: SharedCast
    graph_cast: GraphCast
    anchor: Tensor
    refusal: type[UserError]
    wanted: Collection[Slot] | None
    tail: Tail | None

    @property
    def block(self) -> LayerBlock | None: ...

    @property
    def blocks(self) -> object | None: ...

    def slot(self, parameter: Tensor | None) -> Slot: ...

    def add(self, slot: Slot, contribution: Contribution) -> None: ...

    def is_recording(self) -> bool: ...

    def zero_grad(self, set_to_none: bool = True) -> bool: ...


class Spec(NamedTuple):
    """Of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class EngineTap(InstanceMethod):
    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.engine = engine
        self.name = name  # "" of the root


class CompiledRegion(Protocol):
    """Something that is compiled, called with stand-ins for its taps (compiled/regions.py)."""

    eager: Callable[..., Any]

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]: ...


class RootTap(EngineTap):
    """The root's forward: tells the engine that a pass begins, and with how many samples."""

    region: CompiledRegion  # of a model that is compiled after it was made private
    entered = False  # in a graph: whether `run` has begun the pass outside of it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if self.entered or not torch.is_grad_enabled():
                return self.original(*args, **kwargs)
            return run_outside(self, args, kwargs)
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.run(None, self.original, args, kwargs)

    def run_compiled(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(self.region, forward, args, kwargs)

    def run(
        self,
        region: CompiledRegion | None,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A pass of the model: `forward` is its own, or what was compiled of it, the region."""

        def in_region(*args: Any, **kwargs: Any) -> Any:
            assert region is not None
            if not self.engine.forwards.size():  # an empty batch
                return region.eager(*args, **kwargs)
            before, self.entered = self.entered, True
            try:
                with region.entered(args, kwargs):
                    return forward(*args, **kwargs)
            finally:
                self.entered = before

        try:
            if region is None:
                return self.engine.forwards.call_root(forward, args, kwargs)
            return self.engine.forwards.call_root(region.eager, args, kwargs, compiled=in_region)
        except UserError as refusal:
            if isinstance(refusal, self.engine.refusal):
                raise
            raise self.engine.refusal(str(refusal)) from refusal


class ZeroGradTap(EngineTap):
    """The root's zero_grad: also drops what backward passes have left and was not summed.

    The sums of a logical batch that is not complete are kept, as the optimizer's zero_grad keeps them.
    """

    attribute = "zero_grad"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.engine.zero_grad(*args, **kwargs) else None


class Tapped(torch.autograd.Function):
    """One tapped call: `tap.forward` and `tap.backward` do the work.

    Parameters are not inputs of this function, so autograd has no ordinary gradient to give them and no
    weight-gradient GEMM to run. `anchor` stands for them: it makes the output require a gradient, and whether autograd
    would reach it tells whether a backward pass asks for the parameters' gradients at all.
    """

    @staticmethod
    def forward(ctx: Any, tap: LayerTap, x: Tensor, live: Sequence[bool], anchor: Tensor) -> Tensor:
        if x.is_neg():  # lazily negated: kernels that read memory by its address would see the other sign
            x = x.resolve_neg()
        engine, shape = tap.engine, x.shape
        ctx.tap, ctx.live, ctx.block, ctx.generation = tap, live, engine.block, engine.state.generation
        ctx.empty = None if shape[0] else shape
        output: Tensor = tap.forward(ctx, x) if shape[0] else tap.original(x)
        if output._is_view():  # autograd forbids in-place operations on views made in here, such as ReLU(inplace=True)
            (output,) = torch.unsafe_chunk(output, 1)
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tap: LayerTap = ctx.tap
        engine = tap.engine
        recording = engine.is_recording()
        if torch.is_grad_enabled() or (recording and ctx.generation != engine.state.generation):
            check_backward(tap, ctx.generation)
        if ctx.empty is not None:
            if recording:
                engine.state.record()
            return None, g.new_zeros(ctx.empty), None, None
        if g.is_neg():
            g = g.resolve_neg()
        if not recording:
            return None, _input_gradient(ctx, g) if ctx.needs_input_grad[1] else None, None, None
        if ctx.block is not None:
            with ctx.block.running():
                return None, _recorded_backward(ctx, g), None, None
        return None, _recorded_backward(ctx, g), None, None


# What Function.apply calls after it has looked for torch.func's transforms, which taps do not run in (`admit` refuses).
_apply_tapped: Callable[..., Any] = super(torch.autograd.Function, Tapped).apply


def check_backward(tap: TapOfSamples, generation: int) -> None:
    """Refuse what is no first-order backward pass through a forward pass of the open micro-batch."""
    tap.engine.state.check_graph(tap.name, generation)
    if torch.is_grad_enabled():
        raise UserError("backward(create_graph=True) is not supported: per-sample gradients of gradients are not taken")


def _recorded_backward(ctx: Any, g: Tensor) -> Tensor | None:
    device = device_type(g)
    gradient: Tensor | None
    if torch.is_autocast_enabled(device):  # backward() called inside the autocast context: no cast is wanted here
        with torch.autocast(device, enabled=False):
            gradient = ctx.tap.backward(ctx, g)
    else:
        gradient = ctx.tap.backward(ctx, g)
    return gradient


def _input_gradient(ctx: Any, g: Tensor) -> Tensor | None:
    """The gradient of x alone: to a family's backward, the parameters are frozen."""
    live, ctx.live = ctx.live, [False] * len(ctx.live)
    try:
        with torch.autocast(g.device.type, enabled=False):
            gradient: Tensor | None = ctx.tap.backward(ctx, g)
            return gradient
    finally:
        ctx.live = live


def refuse_replaced(module: str, key: str) -> NoReturn:
    raise UserError(
        f"{module}.{key} was replaced after the engine was attached; detach the engine and attach a new one"
    )


class TapOfSamples(EngineTap):
    """A tap whose module is given the samples of a batch."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name or type(module).__name__, module)
        # Numbers of dimensions of x for which it is known that its rows are the samples, or one row for all of them.
        self.known: set[int] = set()
        self.shared: set[int] = set()

    @property
    def rehearsal(self) -> Run | None:
        """The rehearsal's forward pass that runs now, if one does."""
        return self.engine.forwards.run


class LayerTap(TapOfSamples):
    """The forward of one layer. A family says how in `forward` and `backward`; what they share is here.

    `names`: the parameters the family knows; `slots` and `ctx.live` (does it require a gradient?) go in that order.
    """

    names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    min_dim = 2  # of x, the batch dimension included
    casts_input: ClassVar[bool] = False  # under autocast: `forward` begins with `operands`

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.parameters = module._parameters
        self.handed: tuple[Handed, ...] = ()
        self.calls = 0
        self.counted = True
        self.expected = [(key, module._parameters.get(key)) for key in self.names]
        self.slots = [
            None if module._parameters.get(key) is None else engine.slot(module._parameters[key]) for key in self.names
        ]

    def install(self) -> None:
        self.install_bound()

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether the module's parameters are those the family knows (and not, say, weight_g and weight_v)."""
        owned = {key for key, parameter in module._parameters.items() if parameter is not None}
        return bool(owned) and owned <= set(cls.names)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        if not isinstance(self, LayerTap):  # in a copy of the module: the method that this one stands in for
            return self(*args, **kwargs)
        if is_compiling():
            return self._call_in_graph(*args, **kwargs)
        if not is_grad_enabled():
            return self.original(*args, **kwargs) if self.rehearsal is None else self.rehearse(*args, **kwargs)
        (x,) = (*args, *kwargs.values()) if kwargs else args
        if type(x) is not Tensor and isinstance(x, StandIn):
            x = x.samples()
        parameters = self.parameters
        live = []
        for key, expected in self.expected:  # a plain loop: this runs for every layer of every forward
            parameter = parameters.get(key)
            if parameter is not expected:
                self._accept_whole(key, parameter)
            live.append(parameter is not None and parameter.requires_grad)
        if True not in live:
            return self.original(x)
        engine = self.engine
        if x.dim() not in self.known or x.shape[0] != engine.state.opened_size:
            x = engine.forwards.admit(self, x)
        if engine.wanted is not None:
            wanted = engine.wanted
            live = [is_live and slot in wanted for is_live, slot in zip(live, self.slots, strict=True)]
        return _apply_tapped(self, self.prepare(x), live, engine.anchor)

    def _call_in_graph(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """What torch.compile traces: pure tensor work. What is checked above was checked before the graph began."""
        live = self.live()
        if not torch.is_grad_enabled() or True not in live:
            return self.original(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        return call_traced(self, x, live)

    def live(self) -> tuple[bool, ...]:
        """Which of the parameters `names` require a gradient."""
        parameters = [self.parameters.get(key) for key in self.names]
        return tuple([parameter is not None and parameter.requires_grad for parameter in parameters])

    def is_traceable(self) -> bool:
        """Whether a graph may hold the calls: `gradients` says what backward does, and no subclass says otherwise."""
        says = next((cls for cls in type(self).__mro__ if {"gradients", "backward"} & vars(cls).keys()), LayerTap)
        return says is not LayerTap and "gradients" in vars(says)

    def check_parameters(self) -> None:
        """Refuse parameters that were replaced."""
        for key, expected in self.expected:
            if self.parameters.get(key) is not expected:
                self._accept_whole(key, self.parameters.get(key))

    def _accept_whole(self, key: str, parameter: nn.Parameter | None) -> None:
        """Around forward FSDP2 puts the whole parameter where its shard is: expect that one. Refuse any other."""
        index = self.names.index(key)
        slot = self.slots[index]
        if slot is None or self.expected[index][1] is not slot.parameter or not slot.is_whole(parameter):
            refuse_replaced(self.name, key)
        self.expected[index] = (key, parameter)

    def rehearse(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the layer for a rehearsal, which records its input and may change its output."""
        run = self.rehearsal
        assert run is not None
        if not any(parameter is not None and parameter.requires_grad for parameter in self.parameters.values()):
            return self.original(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        x = x.samples() if isinstance(x, StandIn) else x
        self.admit(x)
        shared = x.shape[0] == 1 != run.batch
        run.see(self, x, (0,), shared=shared)
        with run.inside_layer():
            output = self.original(x)
        run.note_layer(self, x, output, shared=shared)
        return run.answer(self, output, shared=shared)

    def prepare(self, x: Tensor) -> Tensor:
        """What x becomes before it is the input of the autograd node: autograd knows of that itself."""
        return x

    def operand_dtype(self, x: Tensor) -> torch.dtype | None:
        """In which `forward` reads x, where it takes its operands from `operands` and x is not float64."""
        weight = self.parameters.get("weight")
        if not self.casts_input or weight is None or torch.float64 in (weight.dtype, x.dtype):
            return None
        return autocast_dtype(x) if x.is_floating_point() else None

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight and bias of a matrix product or convolution, as autocast would hand them to it."""
        weight: Tensor | None = self.parameters["weight"]
        bias: Tensor | None = self.parameters["bias"]
        assert weight is not None
        dtype = autocast_dtype(x)
        if dtype is not None and weight.dtype != torch.float64:
            x = x.to(dtype) if is_compiling() else self.engine.cast(x, dtype)
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return x, weight, bias

    def admit(self, x: Tensor) -> None:
        """Raise where x has no room for a batch dimension in front."""
        if x.dim() < self.min_dim:
            raise UserError(f"{self.name} was given a tensor of shape {tuple(x.shape)}: {KEEP_BATCH_FIRST}")

    def keep(self, index: int, gradients: Tensor, *, owned: bool = True) -> None:
        """Give the engine per-sample gradients (B, ...) of the parameter `names[index]`.

        owned  nobody else holds them: the engine may overwrite them
        """
        slot = self._described(index, gradients.shape)
        shape = slot.parameter.shape
        values = gradients if gradients.shape[1:] == shape else gradients.view(-1, *shape)
        self.engine.add(slot, Kept(values, owned=owned))

    def defer_sums(self, index: int, g: Tensor) -> None:
        """The per-sample gradients of `names[index]` are Σ_t g_t, g: (B, T, p), which somebody else holds anyway."""
        batch, _, width = g.shape
        self.engine.add(self._described(index, torch.Size((batch, width))), Summed(g))

    def _described(self, index: int, shape: torch.Size) -> Slot:
        slot = self.slots[index]
        assert slot is not None
        if slot.shapes.get("") != shape:
            slot.describe("kept", "per-sample sums over positions", {"": shape})
        return slot

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x where `ctx.needs_input_grad[1]`, then what `record` wants, where `ctx.live` says so.

        Pure tensor work: compiled graphs hold it.
        """
        raise NotImplementedError

    def piece_specs(self, x: Spec, y: Spec, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        """Shapes and dtypes of what `gradients` gives for `record`; None where it gives nothing."""
        raise NotImplementedError

    def record(self, pieces: Sequence[Tensor | None], *, owned: bool = True) -> None:
        """Give the engine the pieces of the parameters' per-sample gradients; `owned` as in `keep`."""
        raise NotImplementedError

    def backward(self, ctx: Any, g: Tensor) -> Tensor | None:
        """The gradient of x where `ctx.needs_input_grad[1]`; those of the parameters go to the engine, in pieces."""
        dx, *pieces = self.gradients(ctx, g)
        self.record(pieces)
        return dx


class SharedCast:
    """Casts under autocast. Remembers the last one weakly: q, k and v read one tensor, and store one cast of it."""

    __slots__ = ("_result", "_source", "_version")

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._result: weakref.ref[Tensor] | None = None
        self._version = -1

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dtype in (dtype, torch.float64) or not x.is_floating_point():
            return x
        if self._source is not None and self._source() is x and self._version == x._version:
            result = self._result() if self._result is not None else None
            if result is not None and result.dtype == dtype:
                return result
        result = x.to(dtype)
        self._source, self._result, self._version = weakref.ref(x), weakref.ref(result), x._version
        return result


def device_type(x: Tensor) -> str:
    """x.device.type, of which a GPU's is asked first: taps ask in every call."""
    return "cuda" if x.is_cuda else x.device.type


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast computes in on x's device, None where it is off."""
    device = device_type(x)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


_output_dtypes: dict[tuple[Any, ...], torch.dtype] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def autocast_output_dtype(
    operator: Callable[[Tensor], Tensor], device: str, x: torch.dtype, dtype: torch.dtype
) -> torch.dtype:
    """The dtype in which an operator outside the lower-precision list answers under autocast, asked of it once.

    Which operators autocast runs in float32 differs between devices and torch versions: `operator` is run on a tiny
    tensor (1, 2, 2) of dtype x.
    """
    known = (operator, device, x, dtype)
    if known not in _output_dtypes:
        _output_dtypes[known] = operator(torch.ones(1, 2, 2, dtype=x, device=device)).dtype
    return _output_dtypes[known]

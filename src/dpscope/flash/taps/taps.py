"""Taps, which replace a module's forward while an engine is attached."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, is_grad_enabled, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Kept, Summed, wide
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.sample_rows.proxy import NotFollowed, Proxy
from dpscope.flash.taps.recorder import Engine, is_recording
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST, NEEDS_DENSE
from dpscope.flash.torch_side.autocast import autocast_dtype, no_autocast
from dpscope.flash.torch_side.frames import break_graph, in_graph
from dpscope.flash.torch_side.instance_method import InstanceMethod


class Spec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class EngineTap(InstanceMethod):
    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.engine = engine
        self.name = name  # "" of the root


class Tapped(torch.autograd.Function):
    """One tapped call: `tap.forward` and `tap.backward` do the work.

    Parameters are not inputs of this function, so autograd has no ordinary gradient to give them and no
    weight-gradient GEMM to run. `anchor` stands for them: it makes the output require a gradient, and autograd reaches
    it only in a backward pass that accumulates gradients of parameters.
    """

    @staticmethod
    def forward(ctx: Any, tap: LayerTap, x: Tensor, live: Sequence[bool], anchor: Tensor) -> Tensor:
        if x.is_neg():  # lazily negated: kernels that read memory by its address would see the other sign
            x = x.resolve_neg()
        engine = tap.engine
        ctx.tap, ctx.live, ctx.recorder, ctx.generation = tap, live, engine.recorder, engine.state.generation
        if not x.shape[0]:
            ctx.empty = x.shape
        output: Tensor = tap.forward(ctx, x) if ctx.empty is None else tap.call_original(x)
        if output._is_view():  # autograd forbids in-place operations on views made in here, such as ReLU(inplace=True)
            (output,) = torch.unsafe_chunk(output, 1)
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        engine = ctx.tap.engine
        recording = is_recording(ctx)
        if ctx.empty is not None:
            if recording:
                engine.state.record()
            return None, g.new_zeros(ctx.empty), None, None
        if g.is_neg():
            g = g.resolve_neg()
        if not recording:
            return None, _input_gradient(ctx, g) if ctx.needs_input_grad[1] else None, None, None
        if ctx.recorder is not engine.recorder:
            with ctx.recorder.entered():
                return None, _without_autocast(ctx, g), None, None
        if _is_any_autocast_enabled():
            return None, _without_autocast(ctx, g), None, None
        return None, ctx.tap.backward(ctx, g), None, None


_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# What Function.apply calls after it has looked for torch.func's transforms, which taps do not run in (`admit` refuses).
_apply_tapped: Callable[..., Any] = super(torch.autograd.Function, Tapped).apply
_Node: Any = Tapped._backward_cls  # the class of `ctx`
_Node.apply = Tapped.backward  # what autograd calls, without torch's search for the function
_Node.empty = None  # the shape of an x without samples
_Node.packed = None


def _without_autocast(ctx: Any, g: Tensor) -> Tensor | None:
    """Run the layer's backward without casts, even if backward() is called inside an autocast context."""
    with no_autocast(g.device.type):
        gradient: Tensor | None = ctx.tap.backward(ctx, g)
        return gradient


def _input_gradient(ctx: Any, g: Tensor) -> Tensor | None:
    """Return the gradient of x alone: the family's backward sees frozen parameters."""
    live, ctx.live = ctx.live, [False] * len(ctx.live)
    try:
        return _without_autocast(ctx, g)
    finally:
        ctx.live = live


def refuse_replaced(tap: TapOfSamples, key: str) -> NoReturn:
    """Refuse a parameter that was replaced; if forward itself replaces it, try to tap a surrounding module."""
    reason = f"{tap.name}.{key} was replaced after the engine was attached; detach the engine and attach a new one"
    raise tap.does_not_fit(reason)


class TapOfSamples(EngineTap):
    """A tap whose module is given the samples of a batch."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name or type(module).__name__, module)
        # Numbers of dimensions of x for which it is known that its rows are the samples, or one row for all of them.
        self.known: set[int] = set()
        self.shared: set[int] = set()
        self.shares_input: bool | None = None  # with another layer that holds the same x; None: nobody has looked

    def note_input(self, x: Tensor) -> None:
        """Note whether other layers read the same x: q, k and v do, and in parallel blocks the first of the MLP."""
        if type(x) is not Tensor and dry_run.current() is None:  # a FakeTensor has no address
            return
        readers, pointer = self.engine.path_rules.readers, x.data_ptr()
        known = readers.get(pointer)
        if known is not None and known[0]() is not None:
            self.shares_input = known[1].shares_input = True
        elif self.shares_input is None:
            self.shares_input = False
        readers[pointer] = weakref.ref(x), self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return break_graph(self, args, kwargs) if in_graph() else self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, outside of compiled graphs."""
        raise NotImplementedError

    def does_not_fit(self, reason: str) -> BaseException:
        """Return the error to raise if the module cannot be tapped this way.

        It restarts the pass with a surrounding module tapped. If that is not possible, `reason` is shown to the user.
        """
        if self.engine.forwards.can_begin_again:
            return NotFollowed([self.module], reason, climb=True)
        return UserError(reason)


class LayerTap(TapOfSamples):
    """Base class of layer families: it runs a layer's forward and records its per-sample gradients in backward.

    A family implements `forward` and `gradients`, which returns per-sample sums over positions. One that leaves other
    pieces also implements `piece_specs` and `record`. A family that implements `backward` instead is not held by
    compiled graphs. `names` lists the parameters that the family knows; `slots` and `ctx.live` (whether each requires a
    gradient) have the same order.

    Args:
        engine: The engine that is attached.
        name: Qualified name of the module in the model.
        module: The module whose forward is replaced.

    Example:
        >>> class Shift(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.bias = torch.nn.Parameter(torch.zeros(width))
        ...
        ...     def forward(self, x):
        ...         return x + self.bias
        >>> class ShiftTap(LayerTap):
        ...     names = ("bias",)
        ...
        ...     def forward(self, ctx, x):
        ...         return self.call_original(x)
        ...
        ...     def backward(self, ctx, g):
        ...         self.keep(0, g.flatten(1, -2).sum(1) if g.dim() > 2 else g.clone())
        ...         return g
        >>> register_layer(Shift, ShiftTap)
    """

    names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    min_dim = 2  # of x, the batch dimension included
    casts_input: ClassVar[bool] = False  # under autocast: `forward` begins with `operands`

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.parameters = module._parameters
        self.graph_calls: Any = None  # the recorder's of compiled graphs
        self.expected = [module._parameters.get(key) for key in self.names]
        self.slots = [
            None if module._parameters.get(key) is None else engine.slot(module._parameters[key]) for key in self.names
        ]

    def install(self) -> None:
        self.install_bound()

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether `module` owns parameters, and only those of `names` (not weight_g, not a buffer)."""
        owned = {key for key, parameter in module._parameters.items() if parameter is not None}
        return bool(owned) and owned <= set(cls.names) and all(key in module._parameters for key in cls.names)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:  # noqa: PLR0911
        if not isinstance(self, LayerTap):  # in a copy of the module: the method that this one stands in for
            return self(*args, **kwargs)
        if in_graph():
            return self.engine.graphs.call(self, args, kwargs)
        if not is_grad_enabled():
            return self.engine.recorder.call_without_gradients(self, args, kwargs)
        (x,) = (*args, *kwargs.values()) if kwargs else args
        if type(x) is not Tensor and isinstance(x, Proxy):
            x = x.samples(self.module)
        parameters = [*map(self.parameters.get, self.names)]
        for index, (parameter, expected) in enumerate(zip(parameters, self.expected, strict=True)):
            if parameter is not expected and self._accept_whole(index, parameter):
                return self.original(x)
        live = [parameter is not None and parameter.requires_grad for parameter in parameters]
        if True not in live:
            return self.original(x)
        engine = self.engine
        if x.ndim not in self.known or x.shape[0] != engine.state.running_size:
            blocks = self.blocks_in(x, engine.forwards.batch_for(self, (x,), {}))
            if blocks is not None:
                return self(blocks).flatten(0, 1)
            x = engine.forwards.admit(self, x)
        wanted = engine.recorder.wanted
        if wanted is not None:
            live = [is_live and slot in wanted for is_live, slot in zip(live, self.slots, strict=True)]
        return _apply_tapped(self, self.prepare(x), live, engine.anchor.tensor)

    def live(self) -> tuple[bool, ...]:
        """Return which of the parameters `names` require a gradient."""
        parameters = [self.parameters.get(key) for key in self.names]
        return tuple([parameter is not None and parameter.requires_grad for parameter in parameters])

    def is_traceable(self) -> bool:
        """Return whether a graph may hold the calls: `gradients` says what backward does, and no subclass differs."""
        says = next((cls for cls in type(self).__mro__ if {"gradients", "backward"} & vars(cls).keys()), LayerTap)
        return says is not LayerTap and "gradients" in vars(says)

    def check_parameters(self) -> None:
        """Refuse parameters that were replaced."""
        for index, key in enumerate(self.names):
            if self.parameters.get(key) is not self.expected[index]:
                self._accept_whole(index, self.parameters.get(key))

    def _accept_whole(self, index: int, parameter: nn.Parameter | None) -> bool:
        """Expect the shard, or the whole parameter that FSDP2 puts in its place around forward; refuse any other.

        Return True if a frozen layer now has another tensor in its place, whose parameters are followed elsewhere.
        """
        slot = self.slots[index]
        if isinstance(parameter, Proxy) and parameter.plain is self.expected[index]:
            return False  # the parameter is used elsewhere, too, and followed there
        if parameter is None and not any(slot is not None and slot.parameter.requires_grad for slot in self.slots):
            return True
        if parameter is not None and (slot is None or not slot.stands_for(parameter)):
            refuse_replaced(self, self.names[index])
        self.expected[index] = parameter  # None if it was removed, as a bias may be
        return False

    def call_original(self, x: Tensor) -> Any:
        """Return the module's own output for `x`. A family with fixed dimensions folds the rows of a sample back in."""
        return self.original(x)

    def blocks_in(self, x: Tensor, batch: int) -> Tensor | None:
        """Return x as (B, k, ...) if it has k·B rows, k consecutive ones for each sample."""
        if x.is_nested:
            raise UserError(f"{self.name} was given a nested tensor, {NEEDS_DENSE}")
        if not batch or x.dim() < self.min_dim or x.shape[0] <= batch or x.shape[0] % batch:
            return None
        return x.reshape(batch, -1, *x.shape[1:])

    def prepare(self, x: Tensor) -> Tensor:
        """Return `x`, (B, ...), as `forward` takes it; autograd differentiates this step itself."""
        return x

    def operand_dtype(self, x: Tensor) -> torch.dtype | None:
        """Return the dtype in which `forward` reads x; None if it does not cast or x is float64."""
        weight = self.parameters.get("weight")
        if not self.casts_input or weight is None or torch.float64 in (weight.dtype, x.dtype):
            return None
        return autocast_dtype(x) if x.is_floating_point() else None

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `x`, weight and bias of a matrix product or convolution, as autocast would cast them."""
        weight: Tensor | None = self.parameters["weight"]
        bias: Tensor | None = self.parameters["bias"]
        assert weight is not None
        dtype = autocast_dtype(x)
        if dtype is not None and weight.dtype != torch.float64:
            if x.dtype != dtype:
                x = self.engine.cast(x, dtype)
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return x, weight, bias

    def admit(self, x: Tensor) -> None:
        """Raise an error if x has no room for a batch dimension in front: its samples may come one by one."""
        if x.dim() < self.min_dim:
            raise self.does_not_fit(f"{self.name} was given a tensor of shape {tuple(x.shape)}: {KEEP_BATCH_FIRST}")

    def keep(self, index: int, gradients: Tensor, *, owned: bool = True) -> None:
        """Give the engine per-sample `gradients`, (B, ...), of parameter `index` of `names`.

        If `owned`, nothing else holds them, and the engine may overwrite them.
        """
        slot = self._described(index, gradients.shape)
        shape = slot.parameter.shape
        values = gradients if gradients.shape[1:] == shape else gradients.view(-1, *shape)
        self.engine.add(slot, Kept(values, owned=owned))

    def defer_sums(self, index: int, g: Tensor, *, owned: bool = False) -> None:
        """Give the engine `g`, (B, T, p): per-sample gradients of parameter `index` of `names` are Σ_t g_t.

        If `owned`, no other contribution holds g.
        """
        batch, _, width = g.shape
        self.engine.add(self._described(index, torch.Size((batch, width))), Summed(g, owned=owned))

    def _described(self, index: int, shape: torch.Size) -> Slot:
        slot = self.slots[index]
        assert slot is not None
        if slot.shapes.get("") != shape:
            slot.describe("kept", "per-sample sums over positions", {"": shape})
        return slot

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        """Return the layer's output for `x`, (B, ...), and save in `ctx` what backward needs."""
        raise NotImplementedError

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x (if `ctx.needs_input_grad[1]`) and the pieces for `record`, given the output's `g`.

        Only tensor operations are allowed, so that compiled graphs can hold them. A piece of a parameter that is not
        in `ctx.live` is None.
        """
        raise NotImplementedError

    def piece_specs(self, x: Spec, y: Spec, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        """Return shape and dtype of each piece that `gradients` returns for `record`, given those of `x` and `y`.

        `live` is `ctx.live`.
        """
        dtype = wide(torch.promote_types(x.dtype, y.dtype))
        return tuple(
            Spec((x.shape[0], slot.parameter.numel()), dtype) if slot is not None and needed else None
            for slot, needed in zip(self.slots, live, strict=True)
        )

    def record(self, pieces: Sequence[Tensor | None], *, owned: bool = True) -> None:
        """Give the engine the `pieces` of the parameters' per-sample gradients; `owned` as in `keep`.

        Pieces are sums over positions, (B, elements of the parameter). Those of a vector may be (B, stretches,
        elements), to be added up with other layers'.
        """
        for index, sums in enumerate(pieces):
            if sums is not None and sums.dim() == 3:
                self.defer_sums(index, sums, owned=True)
            elif sums is not None:
                self.keep(index, sums, owned=owned)

    def backward(self, ctx: Any, g: Tensor) -> Tensor | None:
        """Return the gradient of x (if `ctx.needs_input_grad[1]`), given the output's `g`; record the parameters'."""
        dx, *pieces = self.gradients(ctx, g)
        self.record(pieces)
        return dx

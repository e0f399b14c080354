"""nn.RNN, nn.LSTM and nn.GRU: each layer and direction has a rule of its own.

With u_t = W_ih x_t + b_ih and v_t = W_hh h_{t-1} + b_hh a cell computes its gates from u_t and v_t. Once ∂u and ∂v are
known for every step, per-sample gradients are those of two Linears over the sequence: Σ_t ∂u_t x_tᵀ and
Σ_t ∂v_t h_{t-1}ᵀ. torch's kernels do not give ∂u out, but they give the gradient of their *input*: run on u itself with
the identity for W_ih, that is ∂u, and no weight's gradient is asked for. Forward runs in this form at once if that
loses nothing. In half precision, which would round u, and in checkpoints the layer runs in this form again in backward.

∂v = ∂u, except for GRU's new gate, n_t = tanh(u_n + r_t v_n): there ∂v_n = r_t ∂u_n.

All other cases (projections, inputs without a batch, modules that are not torch's own) run sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpscope.flash.gradients.contributions import Kept
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.conv_products import Geometry, serves_conv
from dpscope.flash.kernels.float32_products import cudnn_in_tf32, rounded_as_cudnn
from dpscope.flash.kernels.sample_sums import bias_sums
from dpscope.flash.layers.conv import add_patches
from dpscope.flash.layers.linear import keep_or_defer
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.layers.sample_call import SampleCall
from dpscope.flash.layers.torchs_own import class_is_own, instance_is_own
from dpscope.flash.sample_rows.proxy import Proxy
from dpscope.flash.taps.recorder import Engine, is_recording, note_call, record
from dpscope.flash.torch_side.autocast import autocast_dtype, no_autocast
from dpscope.flash.torch_side.autograd_graph import current_hooks, keeps_graph

# As they are now: torch's kernels do not ask for them, so those that are patched later are no part of them.
_linear, _dropout = F.linear, F.dropout
_VF: Any = torch._VF
_KERNELS = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}
_CLASSES = {nn.LSTM: "LSTM", nn.GRU: "GRU", nn.RNN: ""}


class Weights(NamedTuple):
    """Weights of one layer in one direction, W_ih: (G, d), W_hh: (G, H), b: (G), and the slots of trained ones."""

    tensors: tuple[Tensor | None, ...]
    slots: tuple[Slot | None, ...]


class RecurrentTap(OpaqueTap):
    """Tap that runs whole sequences if there is a rule for the layer, and sample by sample otherwise."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        self.padded = _PaddedTap(engine, name, module)
        super().__init__(engine, name, module)
        own = next((cls for cls in _CLASSES if isinstance(module, cls)), None)
        self.has_rule = (
            own is not None
            and class_is_own(type(module), own, ())
            and instance_is_own(module, own, ())
            and not getattr(module, "proj_size", 0)
        )
        self.mode: str = getattr(module, "mode", "")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get("input")
        hx: Any = args[1] if len(args) > 1 else kwargs.get("hx")
        packed = isinstance(given, PackedSequence)
        if not torch.is_grad_enabled():
            return super().call(*args, **kwargs)
        has_rule = self.has_rule and not self.derives and _has_batch(given)
        if has_rule and any(slot.parameter.requires_grad for slot in self.slots.values()):
            return self._by_rule(given, hx)
        if not packed:
            return super().call(*args, **kwargs)
        x, lengths = pad_packed_sequence(given, batch_first=self.padded.batch_first)
        y, *rest = self.padded(x, lengths, *args[1:], *(value for key, value in kwargs.items() if key != "input"))
        return self._packed_as(given, y, lengths, self.padded.batch_first), *rest

    def _packed_as(self, given: PackedSequence, y: Tensor, lengths: Tensor, batch_first: bool) -> PackedSequence:
        order = given.sorted_indices
        if order is not None:  # packed as the input was, sample by sample
            y, lengths = y.index_select(0 if batch_first else 1, order), lengths[order.to(lengths.device)]
        data = pack_padded_sequence(y, lengths, batch_first=batch_first).data
        return PackedSequence(data, given.batch_sizes, order, given.unsorted_indices)

    # -- by rule -------------------------------------------------------------------------------------------------------

    def _by_rule(self, given: Tensor | PackedSequence, hx: Any) -> Any:
        module: Any = self.module
        lengths: Tensor | None = None
        if isinstance(given, PackedSequence):
            x, lengths = pad_packed_sequence(given)
        else:
            given = given.samples(module) if isinstance(given, Proxy) else given
            x = given.transpose(0, 1) if module.batch_first else given
            SampleCall(self, (given,), {}).admit()
        states = self._states(x, hx)
        self.describe_rule()
        lasts: list[list[Tensor]] = [[] for _ in states]
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(1 + module.bidirectional):
                index = layer * (1 + module.bidirectional) + direction
                y, *last = self._run_layer(x, [state[index] for state in states], layer, direction, lengths)
                outputs.append(y)
                for kept, one in zip(lasts, last, strict=True):
                    kept.append(one)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if layer + 1 < module.num_layers:
                x = _dropout(x, module.dropout, module.training)
        ends = tuple(torch.stack(each) for each in lasts)
        end = ends if self.mode == "LSTM" else ends[0]
        if isinstance(given, PackedSequence):
            assert lengths is not None
            return self._packed_as(given, x, lengths, False), end
        return x.transpose(0, 1) if module.batch_first else x, end

    def _states(self, x: Tensor, hx: Any) -> list[Tensor]:
        module: Any = self.module
        count = module.num_layers * (1 + module.bidirectional)
        if hx is None:
            zeros = x.new_zeros(count, x.shape[1], module.hidden_size)
            return [zeros, zeros] if self.mode == "LSTM" else [zeros]
        states = list(hx) if self.mode == "LSTM" else [hx]
        return [_with_samples(state, module) if isinstance(state, Proxy) else state for state in states]

    def _run_layer(
        self, x: Tensor, states: list[Tensor], layer: int, direction: int, lengths: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights = self._weights(layer, direction)
        if direction:
            x = _reversed(x, lengths)
        found: tuple[Tensor, ...] = _Layer.apply(self, weights, lengths, self.engine.anchor.tensor, x, *states)  # type: ignore[no-untyped-call]
        y, *last = found
        return _reversed(y, lengths) if direction else y, *last

    def _weights(self, layer: int, direction: int) -> Weights:
        suffix = f"_l{layer}" + ("_reverse" if direction else "")
        whole = self.whole_parameters()
        names = [f"{name}{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        slots = [self.slots[name] if name in whole and whole[name].requires_grad else None for name in names]
        return Weights(tuple(whole.get(name) for name in names), tuple(slots))

    def describe_rule(self) -> None:
        if self.why != _RULE:
            self.why = _RULE
            for slot in self.slots.values():
                slot.describe("outer", _RULE)

    def kernel(self, x: Tensor, states: list[Tensor], weights: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
        """Run one layer in one direction: y: (T, B, H) and the last states (1, B, H). x: (T, B, d)."""
        has_bias = len(weights) > 2
        options = (weights, has_bias, 1, 0.0, self.module.training, False)
        hx: Any = tuple(states) if self.mode == "LSTM" else states[0]
        kernel = _KERNELS[self.mode]
        if lengths is None:
            return list(kernel(x, hx, *options, False))
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        assert packed.sorted_indices is not None and packed.unsorted_indices is not None
        sorted_states = [state.index_select(1, packed.sorted_indices) for state in states]
        hx = tuple(sorted_states) if self.mode == "LSTM" else sorted_states[0]
        data, *last = kernel(packed.data, packed.batch_sizes, hx, *options)
        whole = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        y = pad_packed_sequence(whole, total_length=x.shape[0])[0]
        return [y, *(each.index_select(1, packed.unsorted_indices) for each in last)]

    def record(self, weights: Weights, x: Tensor, before: Tensor, du: Tensor, dv: Tensor) -> None:
        """Give the engine what (T, B, ·) inputs and gradients leave for the weights."""
        x, before, du, dv = (each.transpose(0, 1) for each in (x, before, du, dv))
        of_ih, of_hh, bias_ih, bias_hh = weights.slots
        for slot, side, g in ((of_ih, x, du), (of_hh, before, dv)):
            if slot is None:
                continue
            # cuDNN may round the operands to TF32; these kernels do, and others only if products may be rounded, too.
            if cudnn_in_tf32(g.device, "rnn") and serves_conv(side.mT, g.mT, _EACH_STEP):
                add_patches(self, slot, side.mT, g.mT, _EACH_STEP, "rnn")
            else:
                keep_or_defer(self, slot, side, g)
        for slot, g in ((bias_ih, du), (bias_hh, dv)):
            if slot is not None:
                self.engine.add(slot, Kept(bias_sums(g)))


_EACH_STEP = Geometry((1,), (1,), (0,), (1,), 1)  # a weight is a convolution of one step
_RULE = "a recurrent layer: products of inputs and of hidden states with the gradients of the gates"


class _Layer(torch.autograd.Function):
    """One layer in one direction; backward gives its weights' per-sample gradients to the engine."""

    @staticmethod
    def forward(
        ctx: Any,
        tap: RecurrentTap,
        weights: Weights,
        lengths: Tensor | None,
        anchor: Tensor,
        x: Tensor,
        *states: Tensor,
    ) -> Any:
        note_call(ctx, tap)
        ctx.weights, ctx.lengths = weights, lengths
        ctx.dtype = dtype = autocast_dtype(x) or x.dtype
        # Held where torch says when to let it go, and nothing packs what it saves.
        holds = dtype.itemsize >= 4 and keeps_graph is not None and current_hooks() is None
        with no_autocast(x.device.type):
            ctx.run = run = _run_on_gates(ctx, x, states) if holds else None
            if run is None:
                weights_given = [each for each in _cast_weights(ctx) if each is not None]
                given = [each.to(dtype).unsqueeze(0) for each in states]
                y, *last = tap.kernel(x.to(dtype), given, weights_given, lengths)
                outputs = [y, *(each.squeeze(0) for each in last)]
            else:
                outputs = [each.detach() for each in run.outputs]
        ctx.save_for_backward(x, outputs[0], *states)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        tap: RecurrentTap = ctx.tap
        recording = is_recording(ctx)
        x, y, *states = ctx.saved_tensors
        with no_autocast(x.device.type):
            du, dx, dstates = _gate_gradients(ctx, x, states, gs)
            if recording:
                before = _states_before(y, states[0].to(y.dtype))
                dv = du if tap.mode != "GRU" else _of_hidden_gates(ctx, x, before, du)
                record(ctx, x.shape[1], lambda: tap.record(ctx.weights, x.to(ctx.dtype), before, du, dv))
        return (None, None, None, None, dx, *dstates)


class _Run(NamedTuple):
    """A layer as a function of u: (T, B, G) and the first states, with its history. outputs: y and the last states."""

    u: Tensor
    firsts: list[Tensor]
    outputs: list[Tensor]


def _run_on_gates(ctx: Any, x: Tensor, states: Sequence[Tensor]) -> _Run:
    w_ih, w_hh, b_ih, b_hh = _cast_weights(ctx)
    with torch.enable_grad():
        with rounded_as_cudnn(x.device, "rnn"):
            u = _linear(x.detach().to(ctx.dtype), w_ih, b_ih).detach().requires_grad_()
        firsts = [each.detach().to(ctx.dtype).requires_grad_() for each in states]
        identity = torch.eye(u.shape[-1], dtype=ctx.dtype, device=u.device)
        given = [identity, w_hh] if b_hh is None else [identity, w_hh, torch.zeros_like(b_hh), b_hh]
        y, *last = ctx.tap.kernel(u, [each.unsqueeze(0) for each in firsts], given, ctx.lengths)
        return _Run(u, firsts, [y, *(each.squeeze(0) for each in last)])


def _gate_gradients(ctx: Any, x: Tensor, states: list[Tensor], gs: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the gradients of u, (T, B, G), of x and of the first states."""
    run: _Run = ctx.run or _run_on_gates(ctx, x, states)
    keeps = ctx.run is not None and keeps_graph is not None and keeps_graph()
    if not keeps:  # the loss, alive, holds this node
        ctx.run = None
    reached = [(out, g.to(out.dtype)) for out, g in zip(run.outputs, gs, strict=True) if g is not None]
    found = torch.autograd.grad(
        [out for out, _ in reached], [run.u, *run.firsts], [g for _, g in reached], retain_graph=keeps
    )
    du, *dstates = found
    with rounded_as_cudnn(x.device, "rnn"):
        dx = _linear(du, _cast_weights(ctx)[0].t()).to(x.dtype)
    return du, dx, [g.to(each.dtype) for g, each in zip(dstates, states, strict=True)]


def _cast_weights(ctx: Any) -> list[Any]:
    """Return the weights without history in the layer's dtype; None for missing biases."""
    return [None if each is None else each.detach().to(ctx.dtype) for each in ctx.weights.tensors]


def _states_before(y: Tensor, first: Tensor) -> Tensor:
    """Return h_{t-1} for every step t, (T, B, H)."""
    return torch.cat([first.unsqueeze(0), y[:-1]])


def _of_hidden_gates(ctx: Any, x: Tensor, before: Tensor, du: Tensor) -> Tensor:
    """Return the gradient of v in a GRU: that of the new gate times the reset gate, which is computed again."""
    w_ih, w_hh, b_ih, b_hh = _cast_weights(ctx)
    size = before.shape[-1]
    with rounded_as_cudnn(x.device, "rnn"):
        reset = _linear(x.to(ctx.dtype), w_ih[:size], None if b_ih is None else b_ih[:size])
        reset = reset + _linear(before, w_hh[:size], None if b_hh is None else b_hh[:size])
    return torch.cat([du[..., : 2 * size], du[..., 2 * size :] * reset.sigmoid()], -1)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse every sequence of x: (T, B, ·); entries beyond its length stay."""
    if lengths is None:
        return x.flip(0)
    times = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    ends = lengths.to(x.device)
    index = torch.where(times < ends, ends - 1 - times, times)
    return x.gather(0, index.unsqueeze(-1).expand_as(x))


def _with_samples(state: Tensor, module: nn.Module) -> Tensor:
    """Return a state (layers, B, d) that is made of parameters with a row for each sample, in dimension 1."""
    turned = state.transpose(0, 1)
    return (turned.samples(module) if isinstance(turned, Proxy) else turned).transpose(0, 1)


def _has_batch(given: Any) -> bool:
    return isinstance(given, PackedSequence) or (isinstance(given, Tensor) and given.dim() == 3 and given.numel() > 0)


class _PaddedTap(OpaqueTap):
    """The layer as a function of padded sequences and their lengths, one sample after the other."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.batch_first = bool(module.batch_first)
        self.packed_forward, self.original = self.original, self._forward
        self.functional._run = self._forward
        self.input_dims = {**self.input_dims, "lengths": 0}
        self.by_loop = True
        self.describe("a loop over samples where sequences are packed")

    def _forward(self, input: Tensor, lengths: Tensor, hx: Any = None) -> Any:
        packed = pack_padded_sequence(input, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False)
        y, state = self.packed_forward(packed, hx)
        length = input.shape[1 if self.batch_first else 0]
        return pad_packed_sequence(y, batch_first=self.batch_first, total_length=length)[0], state

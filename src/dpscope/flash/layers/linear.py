"""Linear, and Hugging Face's Conv1D (a Linear whose weight is stored transposed).

y = x Wᵀ + b with x: (B, *, d), W: (p, d). Backward gives x its gradient g W; the weight's GEMM is not run: (x, g) are
handed to the engine as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_zeros  # torch's own, whatever F.pad becomes

from dpscope.flash.gradients.contributions import WIDE_OUTPUT, Kept, Outer, kept_products, wide
from dpscope.flash.gradients.paths import KEEP, Decision, stored_dtype
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.sample_products import makes_norms
from dpscope.flash.kernels.sample_sums import bias_sums
from dpscope.flash.taps.taps import LayerTap, Spec, TapOfSamples
from dpscope.flash.torch_side.arguments import NEEDS_DENSE


def as_sequences(x: Tensor) -> Tensor:
    """Return x: (B, *, d) as (B, T, d), a view if strides allow; (B, d) becomes (B, 1, d)."""
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x.reshape(x.shape[0], -1, x.shape[-1])


ALIGNED_FROM = 1024
"""Columns of g from which products over unaligned rows cost more than a copy that is aligned."""


def missing_columns(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many columns of zeros align g's rows to 16-byte words, if that is worth a copy on a GPU.

    A vocabulary of 50,257 is the common case: on an H200 GPT-2's product in bf16 took 9.1 ms unaligned and 1.6 ms
    aligned (16 × 1024, 2026-11-16).
    """
    return -width % 8 if device.type == "cuda" and dtype.itemsize == 2 and width >= ALIGNED_FROM else 0


def decide(tap: TapOfSamples, slot: Slot, x: Tensor, g: Tensor, width_freed: int | None = None) -> Decision:
    """Choose the path of Σ_t g_t x_tᵀ. Call this just before it is taken: the room to keep gradients changes.

    width_freed: see `Product`
    """
    decision = tap.engine.path_rules.of_product(x.shape, g, width_freed=width_freed, normed=makes_norms(x, g))
    if slot.decision is not decision:  # decisions are the same object where shapes are the same
        slot.describe("outer", decision, {"x": x.shape, "g": g.shape})
    return decision


def add_product(tap: TapOfSamples, slot: Slot, x: Tensor, g: Tensor, decision: Decision) -> None:
    """Record Σ_t g_t x_tᵀ: as per-sample gradients now, which frees x and g, or as x and g until norms are taken."""
    if decision.path == KEEP:
        one = x.shape[0] == 1
        tap.engine.add(slot, Kept(lone_gradient(x, g, slot.parameter.dtype)) if one else kept_products(x, g))
    else:
        tap.engine.add(slot, Outer(x, g, decision))


def keep_or_defer(tap: TapOfSamples, slot: Slot, x: Tensor, g: Tensor, width_freed: int | None = None) -> None:
    add_product(tap, slot, x, g, decide(tap, slot, x, g, width_freed))


def lone_gradient(x: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a single sample, (1, p, d), in the parameter's dtype, as ordinary training would."""
    left, right, dtype = g[0].t(), x[0], stored_dtype(dtype)
    if WIDE_OUTPUT and left.is_cuda and dtype == torch.float32 and left.dtype.itemsize == 2:
        return torch.mm(left, right, out_dtype=dtype).unsqueeze(0)
    return torch.mm(left, right).to(dtype).unsqueeze(0)


class LinearTap(LayerTap):
    transposed = False
    casts_input = True

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        x, weight, bias = self.operands(x)
        recorder, trains_weight = ctx.recorder, ctx.live[0]
        if trains_weight:
            if x.layout != torch.strided:
                self._refuse_sparse()
            if recorder.notes_inputs:
                self.note_input(x)
        recorder.save(ctx, x if trains_weight else None, weight if ctx.needs_input_grad[1] else None)
        output: Tensor = recorder.linear(x, weight.t() if self.transposed else weight, bias)
        return output

    def _refuse_sparse(self) -> NoReturn:
        raise self.engine.refusal(f"{self.name} was given a sparse tensor, {NEEDS_DENSE}")

    def _width_freed(self, x: Tensor, g: Tensor) -> int:
        """Return the width that keeping the product frees: the output gradient, and x if no other layer holds it."""
        return g.shape[-1] + (x.shape[-1] if self.shares_input is False else 0)

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.recorder.saved(ctx)
        trains_weight, trains_bias = ctx.live
        postpones = trains_weight and trains_bias and not ctx.recorder.sums_at_once
        sums = ctx.recorder.bias_sums(as_sequences(g)) if trains_bias and not postpones else None
        dx, g = self._input_gradient(ctx, g, weight)
        # Sums that are postponed are those of g, which the weight holds anyway.
        return dx, x, g if trains_weight else None, g if postpones else sums

    def _input_gradient(self, ctx: Any, g: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return the gradient of x, and g with columns of zeros at its end if they make products faster."""
        missing = missing_columns(g.shape[-1], g.dtype, g.device)
        if missing:
            g = pad_zeros(g, (0, missing))
        if not ctx.needs_input_grad[1]:
            return None, g
        assert weight is not None
        weight = weight.t() if self.transposed else weight
        return g @ (pad_zeros(weight, (0, 0, 0, missing)) if missing else weight), g

    def piece_specs(self, x: Spec, y: Spec, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        trains_weight, trains_bias = live
        width = y.shape[-1]
        sums = Spec((y.shape[0], width), wide(y.dtype)) if trains_bias else None
        if not trains_weight:
            return None, None, sums
        weight = self.parameters["weight"]
        assert weight is not None
        width += missing_columns(width, y.dtype, weight.device)
        return Spec(x.shape, y.dtype), Spec((*y.shape[:-1], width), y.dtype), sums

    def record(self, pieces: Sequence[Tensor | None], *, owned: bool = True) -> None:
        x, g, sums = pieces
        postpones = sums is not None and sums is g
        if sums is not None and not postpones:
            self.keep(1, sums, owned=owned)
        if x is None or g is None:
            return
        if self.shares_input is None:  # nobody looked in forward
            self.note_input(x)
        slot, first, second = self._product(x, as_sequences(g))
        decision = decide(self, slot, first, second, self._width_freed(x, g))
        if postpones and decision.path == KEEP:  # first the sums: torch's scratch memory for them is as large as g
            self.keep(1, bias_sums(first if self.transposed else second))
        if not postpones or decision.path == KEEP:
            add_product(self, slot, first, second, decision)
            return
        product = Outer(first, second, decision)
        self.defer_sums(1, product.first if self.transposed else product.g)
        self.engine.add(slot, product)

    def _product(self, x: Tensor, g: Tensor) -> tuple[Slot, Tensor, Tensor]:
        """Return the weight's slot and the two operands of its gradient."""
        slot = self.slots[0]
        assert slot is not None
        width = slot.parameter.shape[1 if self.transposed else 0]
        if g.shape[2] > width:
            g = g[..., :width]  # without the zeros: the rows stay aligned
        return (slot, g, as_sequences(x)) if self.transposed else (slot, as_sequences(x), g)


class TransposedLinearTap(LinearTap):
    """y = x W + b with W: (d, p)."""

    transposed = True

"""The autograd node behind a use of a bare parameter, through which its gradient comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpscope.flash.layers.bare_gradients import Operand
from dpscope.flash.sample_rows.proxy import Proxy
from dpscope.flash.taps.recorder import is_recording, note_call, record
from dpscope.flash.torch_side.autocast import autocast_dtype, no_autocast


class Used(torch.autograd.Function):
    """Autograd node that returns y unchanged; backward gives the use its gradient."""

    @staticmethod
    def forward(ctx: Any, call: Any, anchor: Tensor, *ys: Tensor) -> Any:
        use, leaves, spec = call
        note_call(ctx, use.tap)
        ctx.use, ctx.spec = use, spec
        ctx.autocast = ys[0].device.type, autocast_dtype(ys[0])
        ctx.leaves, ctx.places = list(leaves), []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Proxy):
                ctx.leaves[place] = leaf.shape
                ctx.places.append(place)
        if use.saves:
            ctx.save_for_backward(*(leaves[place] for place in ctx.places))
        results = tuple(y.clone() if use.copies else _unsafe_view(y, y.shape) for y in ys)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:
        if is_recording(ctx):
            record(ctx, len(gs[0]), lambda: _record(ctx, gs))
        return (None, None, *gs)


_unsafe_view = torch.ops.aten._unsafe_view.default
# What Function.apply calls after it has looked for torch.func's transforms, in which nothing is followed.
apply_used: Any = super(torch.autograd.Function, Used).apply


def _record(ctx: Any, gs: tuple[Tensor, ...]) -> None:
    use = ctx.use
    leaves = list(ctx.leaves)
    if use.saves:
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            leaves[place] = tensor
    gs = tuple(g.resolve_neg() for g in gs)
    with no_autocast(ctx.autocast[0]):
        use.record(operands_of(leaves), ctx.spec, gs, ctx.autocast)


def operands_of(leaves: list[Any]) -> list[Any]:
    """Return the operands of a use, with proxies replaced by their tensors."""
    return [Operand(leaf.plain) if isinstance(leaf, Proxy) else leaf for leaf in leaves]

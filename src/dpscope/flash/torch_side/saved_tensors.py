"""Tensors that a tap saves for backward, given to a checkpoint before the layer computes.

A checkpoint that runs its block again stops at the last tensor that backward needs. Torch's own operators save their
inputs first and compute then, so the product of a block's last layer is not made again (a third of the products of a
transformer block's forward). An autograd.Function saves when its forward has returned, too late for that: inside a
checkpoint taps call its hooks themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpscope.flash.torch_side.saved_tensor_hooks import current_hooks

# Whether the backward pass that runs was asked to retain its graph; None where torch does not tell.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors like ctx.save_for_backward. Call this before the layer computes."""
    hooks = None if ctx.traced or keeps_graph is None else current_hooks()
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        ctx.save_for_backward(*tensors)
    else:
        pack, ctx.unpack = hooks
        ctx.packed = [None if tensor is None else pack(tensor.detach()) for tensor in tensors]


def saved(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors like ctx.saved_tensors, and None in place of each None."""
    if ctx.traced or ctx.packed is None:
        tensors: tuple[Any, ...] = ctx.saved_tensors
        return tensors
    if ctx.unpack is None:
        raise RuntimeError(
            "a layer is to run backward a second time, and what it saved has been freed: say retain_graph=True the "
            "first time"
        )
    found = tuple(None if each is None else ctx.unpack(each) for each in ctx.packed)
    assert keeps_graph is not None
    if not keeps_graph():  # the hooks hold the checkpoint's input; the loss, alive, holds this node
        ctx.packed, ctx.unpack = (), None
    return found

"""Operators that torch's C++ code chooses by GPU, chosen here for a card, and their internal allocations.

The rules are those of torch 2.11 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), which earlier versions share
but for the preference of cuDNN on Hopper.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscope.forecast.cards import Card

HALF_FORMATS = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


@contextmanager
def cuda_operators(card: Card) -> Iterator[None]:
    """Run the kernels that a CUDA build of torch would choose on the card."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("scaled_dot_product_attention", partial(_attend, card), "AutogradCUDA")
            library.impl("dropout", _drop_out, "AutogradCUDA")
        yield
    finally:
        library._destroy()


def _attend(
    card: Card,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    out: Tensor
    if {q.dim(), k.dim(), v.dim()} != {4} or q.shape[-1] != v.shape[-1]:
        return _attend_by_products(q, k, v, attn_mask, is_causal)
    fused = attn_mask is None and q.dtype in HALF_FORMATS and card.capability >= (8, 0)
    if k.shape[1] != q.shape[1] and not fused:  # the memory-efficient kernel has no groups of queries
        out = aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    needs_lse = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    if fused and q.shape[-1] <= 256:
        if card.capability >= (9, 0) and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0:
            call = aten._scaled_dot_product_cudnn_attention
            (out, *_) = call(q, k, v, None, needs_lse, dropout_p, is_causal, False, scale=scale)
            return out
        missing = -q.shape[-1] % 8
        if missing:
            q, k, v = (F.pad(each, (0, missing)) for each in (q, k, v))
        (out, *_) = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)
        return out[..., : out.shape[-1] - missing] if missing else out
    bias = _bias_of(attn_mask, q)
    (out, *_) = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, needs_lse, dropout_p, is_causal, scale=scale
    )
    return out


def _bias_of(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask as the memory-efficient kernel reads it: added numbers, rows on 16-byte words."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(q.dtype)
    elif mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    missing = -mask.shape[-1] % 16
    if missing:
        mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
    shape = (q.shape[0], q.shape[1], q.shape[2], mask.shape[-1])
    return mask.expand(shape)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if is_causal:
        length = (q.shape[-2], k.shape[-2])
        mask = torch.ones(length, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    attended: Tensor = scores.softmax(-1) @ v
    return attended


def _drop_out(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not input.numel():
        return input
    dropped: Tensor = input * 0 if p == 1 else torch.native_dropout(input, p, True)[0]
    return dropped


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the tensor that _grouped_mm makes on CUDA, in any format: torch's rule for fake tensors takes bf16 alone.

    Rows begin at 16-byte words.
    """
    if a.dim() == 2 and b.dim() == 2:
        assert offsets is not None
        shape = [len(offsets), a.shape[0], b.shape[1]]
    else:
        shape = [*(a.shape[:-1] if b.dim() == 3 else a.shape[1:-1]), b.shape[-1]]
    width = 16 // a.element_size()
    row = -(-shape[-1] // width) * width
    return torch.empty_strided(shape, [shape[-2] * row, row, 1][-len(shape) :], dtype=a.dtype, device=a.device)


# -- what operators allocate and free inside themselves ----------------------------------------------------------------


def _cudnn_backward(args: tuple[Any, ...], card: Card) -> int:
    """Return the bytes of float32 sums of q's gradient, and one number a row."""
    q = args[1]
    return int(4 * q.numel() + 4 * math.prod(q.shape[:3]))


def _flash_backward(args: tuple[Any, ...], card: Card) -> int:
    q = args[1]
    batch, heads, length, width = q.shape
    rows = -(-length // 128) * 128
    return int(4 * batch * heads * rows * (1 + -(-width // 32) * 32))


def _efficient_backward(args: tuple[Any, ...], card: Card) -> int:
    q = args[1]
    accumulated = 2 * 4 * q.numel() if q.dtype in HALF_FORMATS else 0
    return int(4 * math.prod(q.shape[:3]) + accumulated)


def _sorted_ids(args: tuple[Any, ...], card: Card) -> int:
    """Return the bytes that embedding_dense_backward needs to sort the ids and count repeated ones."""
    ids = args[1]
    return int(8 * ids.numel() * 6) if ids.numel() > 3072 else 0


INSIDE: dict[str, Callable[[tuple[Any, ...], Card], int]] = {
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::embedding_dense_backward": _sorted_ids,
}


def bytes_inside(func: Any, args: tuple[Any, ...], card: Card) -> int:
    """Return the bytes that an operator takes beside its results while it runs."""
    inside = INSIDE.get(func._schema.name)
    return 0 if inside is None else inside(args, card)

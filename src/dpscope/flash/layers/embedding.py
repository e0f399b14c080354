"""Embedding: y = W[ids], ids: (B, *). Row i of a sample's gradient is Σ_{t: ids_t = i} g_t; padding_idx gets none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash.contributions import Kept, Lookup
from dpscope.flash.paths import KEEP, stored_dtype
from dpscope.flash.taps import Engine, LayerTap


class EmbeddingTap(LayerTap):
    names = ("weight",)
    min_dim = 1  # one id a sample

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        super().__init__(engine, name, module)
        self.padding_idx = module.padding_idx

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        weight = self.parameters["weight"]
        assert weight is not None
        ctx.save_for_backward(x)
        return F.embedding(x, weight, self.padding_idx)

    def backward(self, ctx: Any, g: Tensor) -> None:
        (ids,) = ctx.saved_tensors
        slot = self.slots[0]
        assert slot is not None
        batch, (rows, width) = ids.shape[0], slot.parameter.shape
        flat = ids.reshape(batch, -1)
        decision = self.engine.path_rules.of_lookup(*flat.shape)
        slot.describe("lookup", decision, {"ids": ids.shape, "g": g.shape})
        lookup = Lookup(flat, g.reshape(batch, -1, width), rows, self.padding_idx, decision)
        if decision.path == KEEP:
            self.engine.add(slot, Kept(lookup.materialise().to(stored_dtype(slot.parameter.dtype))))
        else:
            self.engine.add(slot, lookup)


class ScaledEmbeddingTap(EmbeddingTap):
    """y = s W[ids], with s the module's `embed_scale`: the word embeddings of Gemma and its kin in Hugging Face."""

    def _scale(self, dtype: torch.dtype) -> Any:
        scale = self.module.embed_scale
        return scale.to(dtype) if isinstance(scale, Tensor) else scale

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        output = super().forward(ctx, x)
        scaled: Tensor = output * self._scale(output.dtype)
        return scaled

    def backward(self, ctx: Any, g: Tensor) -> None:
        super().backward(ctx, g * self._scale(g.dtype))

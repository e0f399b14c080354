"""Embedding: y = W[ids], ids: (B, *). Row i of a sample's gradient is Σ_{t: ids_t = i} g_t; padding_idx gets none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash.gradients.contributions import Kept, Lookup
from dpscope.flash.gradients.paths import KEEP, stored_dtype
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.layers.refusals import refuse_trained
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import LayerTap, Spec, TapOfSamples


class EmbeddingTap(LayerTap):
    names = ("weight",)
    min_dim = 1  # one id a sample

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        super().__init__(engine, name, module)

    @property
    def padding_idx(self) -> int | None:
        return cast("int | None", self.module.padding_idx)

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        weight = self.parameters["weight"]
        assert weight is not None
        module = self.module
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:  # set after it was tapped
            refuse_trained(self.name, module)
        ctx.save_for_backward(x)
        ctx.padding_idx = self.padding_idx
        return F.embedding(x, weight, ctx.padding_idx)

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return None, ids, g

    def backward(self, ctx: Any, g: Tensor) -> Tensor | None:
        _, ids, g_of_rows = self.gradients(ctx, g)
        self._record(ids, g_of_rows, ctx.padding_idx)
        return None

    def piece_specs(self, x: Spec, y: Spec, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        return x, y

    def record(self, pieces: Sequence[Tensor | None], *, owned: bool = True) -> None:
        ids, g = pieces
        self._record(ids, g, self.padding_idx)

    def _record(self, ids: Tensor | None, g: Tensor | None, padding_idx: int | None) -> None:
        slot = self.slots[0]
        if ids is not None and g is not None and slot is not None:
            add_lookup(self, slot, lookup_of(self, slot.parameter, ids, g, padding_idx))


def lookup_of(tap: TapOfSamples, weight: Tensor, ids: Tensor, g: Tensor, padding_idx: int | None) -> Lookup:
    """Return the per-sample gradients of the table `weight`, (rows, width), for ids: (B, *) and g: (B, *, width)."""
    batch, (rows, width) = ids.shape[0], weight.shape
    flat = ids.reshape(batch, -1)
    return Lookup(flat, g.reshape(batch, -1, width), rows, padding_idx, tap.engine.path_rules.of_lookup(*flat.shape))


def add_lookup(tap: TapOfSamples, slot: Slot, lookup: Lookup) -> None:
    """Give the engine the per-sample gradients of a table, kept or as ids and g."""
    slot.describe("lookup", lookup.decision, {"ids": lookup.ids.shape, "g": lookup.g.shape})
    kept = lookup.decision.path == KEEP
    tap.engine.add(slot, Kept(lookup.materialise().to(stored_dtype(slot.parameter.dtype))) if kept else lookup)


class ScaledEmbeddingTap(EmbeddingTap):
    """Tap of y = s W[ids], with s the module's `embed_scale`: the word embeddings of Hugging Face's Gemma models."""

    def _scale(self, dtype: torch.dtype) -> Any:
        scale = self.module.embed_scale
        return scale.to(dtype) if isinstance(scale, Tensor) else scale

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        output = super().forward(ctx, x)
        scaled: Tensor = output * self._scale(output.dtype)
        return scaled

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return super().gradients(ctx, g * self._scale(g.dtype))

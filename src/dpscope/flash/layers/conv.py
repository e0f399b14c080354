"""Conv1d, Conv2d, Conv3d: a Linear over unfolded patches.

With x: (B, C, *) and g: (B, O, *out), L = Π out, a sample's weight gradient is Σ_l g_l patch_lᵀ, where patch_l is the
window of x under output position l: (C/groups · Π kernel). Groups are samples of their own to that product. Patches are
Π kernel times as large as x: they are never stored, but made again, some samples at a time, when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash.contributions import Kept, Outer, Saved, chunks, wide, wide_product
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.paths import DIRECT, KEEP, RANK1, Decision, exact_path, stored_dtype
from dpscope.flash.saved_tensors import save, saved
from dpscope.flash.taps import Engine, LayerTap, Spec
from dpscope.vocabulary.allocations import allocates
from dpscope.vocabulary.components import GRADIENTS

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


@dataclass(frozen=True)
class Geometry:
    """Per spatial dimension, except `groups`. `padding` is of zeros, the same on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def unfold(self, x: Tensor, out: tuple[int, ...]) -> Tensor:
        """x: (b, C, *) -> (b·groups, L, C/groups · Π kernel), the windows under the `out` positions."""
        if any(self.padding):
            x = F.pad(x, [side for pad in reversed(self.padding) for side in (pad, pad)])
        batch, channels, spatial = x.shape[0], x.shape[1] // self.groups, x.stride()[2:]
        size = (batch, self.groups, channels, *out, *self.kernel)
        steps = [stride * step for stride, step in zip(spatial, self.stride, strict=True)]
        taps = [stride * step for stride, step in zip(spatial, self.dilation, strict=True)]
        windows = x.as_strided(size, (x.stride(0), x.stride(1) * channels, x.stride(1), *steps, *taps))
        n = len(out)
        windows = windows.permute(0, 1, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
        return windows.reshape(batch * self.groups, math.prod(out), -1)


class Patches(Saved):
    """`x`: (B, C, *), `g`: (B, O, *out); an Outer over patches that are made again for each use."""

    __slots__ = ("geometry", "shape")
    kind = "patches"

    def __init__(self, x: Tensor, g: Tensor, geometry: Geometry, shape: tuple[int, ...], decision: Decision) -> None:
        super().__init__(x, g, decision)
        self.geometry = geometry
        self.shape = shape  # of the weight

    def _outer(self, samples: slice) -> Outer:
        """Of some samples; groups stand as samples beside one another: (b·groups, L, ·)."""
        x, g = self.first[samples], self.g[samples]
        groups = self.geometry.groups
        out = tuple(g.shape[2:])
        rows = g.reshape(g.shape[0] * groups, g.shape[1] // groups, -1).transpose(1, 2)
        return Outer(self.geometry.unfold(x, out), rows, self.decision)

    def _chunks(self) -> Iterator[slice]:
        patches = math.prod(self.g.shape[2:]) * self.first.shape[1] * math.prod(self.geometry.kernel)
        return chunks(self.batch_size, patches * self.first.element_size())

    def _gradients(self, samples: slice) -> Tensor:
        return self._outer(samples).materialise().view(-1, *self.shape)

    def materialise(self) -> Tensor:
        return torch.cat([self._gradients(samples) for samples in self._chunks()])

    def norms_squared(self) -> Tensor:
        return torch.cat([self._norms_squared(samples) for samples in self._chunks()])

    def _norms_squared(self, samples: slice) -> Tensor:
        outer = self._outer(samples)
        path = exact_path(self.decision.path, outer.g)
        if path == RANK1:
            norms = outer.rank1_norms_squared()
        elif path == DIRECT:
            norms = outer.norms_squared()
        else:
            norms = gram_norms_squared([GramUnit(gs=(outer.g,), xs=(outer.x,))])
        return norms.view(-1, self.geometry.groups).sum(1)

    @allocates(GRADIENTS, "aten::new_zeros")
    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        dtype = wide(self.g.dtype)
        total = out if out is not None and out.dtype == dtype else None
        total = self.g.new_zeros(self.shape, dtype=dtype) if total is None else total
        for samples in self._chunks():
            if self.geometry.groups == 1 and total.is_contiguous():
                self._outer(samples).clipped_sum(scale[samples], total.view(self.shape[0], -1))
            else:
                outer = self._outer(samples)  # in half precision not rounded, as its norm is not
                products = wide_product(outer.g.mT, outer.x).view(-1, *self.shape)
                Kept(products).clipped_sum(scale[samples], total)
        return total if out is None or total is out else out.add_(total)


class ConvTap(LayerTap):
    casts_input = True

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        conv = cast("nn.Conv2d", module)
        self.convolve = next(f for cls, f in _CONVOLUTIONS.items() if isinstance(module, cls))
        n = len(conv.kernel_size)
        self.min_dim = n + 2
        kernel, dilation = tuple(conv.kernel_size), tuple(conv.dilation)
        before = _same_padding(kernel, dilation) if conv.padding == "same" else [(0, 0)] * n
        if not isinstance(conv.padding, str):
            before = [(pad, pad) for pad in conv.padding]
        # Padding that is the same on both sides and of zeros is left to the convolution; any other is put on first.
        inside = conv.padding_mode == "zeros" and all(left == right for left, right in before)
        self.pad = None if inside else [side for pair in reversed(before) for side in pair]
        self.pad_mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        padding = tuple(left for left, _ in before) if inside else (0,) * n
        self.geometry = Geometry(kernel, tuple(conv.stride), padding, dilation, conv.groups)

    def prepare(self, x: Tensor) -> Tensor:
        return x if self.pad is None else F.pad(x, self.pad, mode=self.pad_mode)

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        x, weight, bias = self.operands(x)
        save(ctx, x if ctx.live[0] or ctx.needs_input_grad[1] else None, weight)
        at = self.geometry
        output: Tensor = self.convolve(x, weight, bias, at.stride, at.padding, at.dilation, at.groups)
        return output

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        trains_weight, trains_bias = ctx.live
        sums = g.flatten(2).sum(2, dtype=wide(g.dtype)) if trains_bias else None
        dx = None
        if ctx.needs_input_grad[1]:
            at, n = self.geometry, len(self.geometry.kernel)
            arguments = (at.stride, at.padding, at.dilation, False, [0] * n, at.groups, [True, False, False])
            dx = torch.ops.aten.convolution_backward(g, x, weight, None, *arguments)[0]
        return (dx, x, g, sums) if trains_weight else (dx, None, None, sums)

    def piece_specs(self, x: Spec, y: Spec, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        trains_weight, trains_bias = live
        sums = Spec(y.shape[:2], wide(y.dtype)) if trains_bias else None
        return (Spec(x.shape, y.dtype), y, sums) if trains_weight else (None, None, sums)

    def record(self, pieces: Sequence[Tensor | None], *, owned: bool = True) -> None:
        x, g, sums = pieces
        if sums is not None:
            self.keep(1, sums, owned=owned)
        if x is not None and g is not None:
            self._add_weight(x, g)

    def _add_weight(self, x: Tensor, g: Tensor) -> None:
        slot = self.slots[0]
        assert slot is not None
        decision = self._decide(x, g)
        slot.describe("patches", decision, {"x": x.shape, "g": g.shape})
        patches = Patches(x, g, self.geometry, tuple(slot.parameter.shape), decision)
        if decision.path == KEEP:
            values = patches.materialise()
            self.engine.add(slot, Kept(values.to(stored_dtype(slot.parameter.dtype)) if x.shape[0] == 1 else values))
        else:
            self.engine.add(slot, patches)

    def _decide(self, x: Tensor, g: Tensor) -> Decision:
        groups, kernel = self.geometry.groups, math.prod(self.geometry.kernel)
        d, p = x.shape[1] // groups * kernel, g.shape[1] // groups
        length, held = math.prod(g.shape[2:]), math.prod(x.shape[1:])
        rules = self.engine.path_rules
        decision = rules.of_product((x.shape[0], length, d), g, p=p, x_held=held)
        if groups > 1 and rules.forced is None:
            return Decision(KEEP, f"{groups} groups: per-sample gradients are small", decision.costs)
        return decision


def _same_padding(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """padding="same": the odd element goes to the right, as in torch."""
    totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return [(total // 2, total - total // 2) for total in totals]

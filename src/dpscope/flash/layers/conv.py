"""Conv1d, Conv2d, Conv3d: a Linear over patches.

With x: (B, C, *) and g: (B, O, *out), L = Π out, a sample's weight gradient is Σ_l g_l patch_lᵀ, where patch_l is the
window of x under output position l: (C/groups · Π kernel). The product treats groups as further samples.

On a GPU, kernels load the windows as they multiply them (kernels/conv_products.py), for norms, kept gradients and sums
alike. Where they do not serve, patches are made again, some samples at a time, when they are needed. They are Π kernel
times as large as x, and made as (C/groups · Π kernel, L), positions side by side as in x and g: one copy in the order
of memory, and none for kernels of one element.

On a CPU torch's own gradient of a convolution's weight is faster than any of this: with samples as groups it gives
their gradients, and with scaled output gradients the clipped sum.

On a GPU torch rounds the operands of convolutions to TF32 unless it is told otherwise, those of matrix products only if
it is told to. The kernels round as the convolution does, as it was set in backward. With patches only kept gradients
are rounded this way; all other products are rounded as the user set it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash.gradients.contributions import Kept, Outer, Outs, Saved, wide, wide_product
from dpscope.flash.gradients.paths import DIRECT, KEEP, RANK1, Decision, PathRules, Unfolded, exact_path, stored_dtype
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.conv_products import (
    ConvProduct,
    Geometry,
    conv_norms,
    conv_products,
    conv_sum,
    conv_sums,
    serves_conv,
)
from dpscope.flash.kernels.float32_products import convolves_unrounded, cudnn_in_tf32, rounded_as_cudnn
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.tensor_lists import alike
from dpscope.flash.kernels.triton_runtime import slices
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import LayerTap, Spec, TapOfSamples
from dpscope.vocabulary.components import GRADIENTS
from dpscope.vocabulary.phases import allocates

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


class Patches(Saved):
    """An Outer over patches that are made again for each use. `x`: (B, C, *), `g`: (B, O, *out).

    Where a sample has k images, both have one dimension more: (B, k, C, *).
    """

    __slots__ = ("by_kernel", "by_torch", "geometry", "in_tf32", "shape")
    kind = "patches"

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        geometry: Geometry,
        shape: tuple[int, ...],
        decision: Decision,
        operator: str = "conv",
    ) -> None:
        super().__init__(x, g, decision)
        self.geometry = geometry
        self.shape = shape  # of the weight
        self.in_tf32 = g.dtype == torch.float32 and cudnn_in_tf32(g.device, operator)
        # Kernels that need no patches; depthwise layers have torch's.
        self.by_kernel = not _is_depthwise(shape, geometry) and serves_conv(self.first, self.g, geometry)
        self.by_torch = not self.by_kernel and g.device.type == "cpu" and convolves_unrounded()

    def _product(self) -> ConvProduct:
        return ConvProduct(self.first, self.g, self.geometry, self.in_tf32)

    def kept(self) -> Kept:
        """Return the per-sample gradients, with their norms where one kernel makes both."""
        if not self.by_kernel:
            return Kept(self.materialise())
        values, squares = conv_products(self._product(), stored_dtype(self.g.dtype))
        assert values is not None
        return Kept(values.view(-1, *self.shape), squares=squares)

    def _outer(self, samples: slice) -> Outer:
        """Return the products of some samples, with groups as further samples: (b·groups, L, ·)."""
        x, g = self.first[samples], self.g[samples]
        groups = self.geometry.groups
        images = math.prod(g.shape[1 : -len(self.geometry.kernel) - 1])
        if g.dim() > len(self.geometry.kernel) + 2:
            x, g = x.flatten(0, 1), g.flatten(0, 1)
        rows = g.reshape(g.shape[0] * groups, g.shape[1] // groups, -1)
        patches = self.geometry.unfold(x, tuple(g.shape[2:]))
        if images > 1:
            patches, rows = (_images_along_positions(each, images, groups) for each in (patches, rows))
        return Outer(patches.mT, rows.mT, self.decision)

    def products_along(self, directions: Tensor, *, keep: bool) -> tuple[Tensor | None, Tensor]:
        """Return per-sample gradients, if kept, and (B, 3, O) float64 of their rows.

        Those are squares, sums, and products with `directions`, (O, n).
        """
        dtype = stored_dtype(self.g.dtype) if keep else None
        values, products = conv_products(self._product(), dtype, directions=directions)
        return None if values is None else values.view(-1, *self.shape), products.sum(1)

    def grouped(self, group: Callable[[Tensor], Tensor], rules: PathRules) -> Patches:
        x, g = map(group, self.saved)
        if self.first.dim() > len(self.geometry.kernel) + 2:  # there are several images in a row already
            x, g = x.flatten(1, 2), g.flatten(1, 2)
        decision = replace(self.decision, path=DIRECT) if self.decision.path == RANK1 else self.decision
        return Patches(x, g, self.geometry, self.shape, decision)

    def _chunks(self) -> list[slice]:
        n = len(self.geometry.kernel)
        positions = math.prod(self.g.shape[1:]) // self.g.shape[-n - 1]  # of all images of a sample
        patches = positions * self.first.shape[-n - 1] * math.prod(self.geometry.kernel) * self.geometry.copies
        return list(slices(self.batch_size, patches * self.first.element_size(), scratch=True))

    def _gradients(self, samples: slice) -> Tensor:
        if self.by_torch or (_is_depthwise(self.shape, self.geometry) and self.g.dim() == len(self.shape)):
            return self._by_groups(samples, stored_dtype(self.g.dtype))
        return self._outer(samples).materialise().view(-1, *self.shape)

    def _by_groups(self, samples: slice, dtype: torch.dtype) -> Tensor:
        """Return per-sample gradients by torch's own kernel: samples are further groups of channels."""
        g, x = (each[samples].to(dtype) for each in (self.g, self.first))
        if g.dim() == len(self.shape):  # one image a sample
            g, x = g.unsqueeze(1), x.unsqueeze(1)
        g, x = (each.transpose(0, 1).flatten(1, 2) for each in (g, x))  # (k, b·C, *)
        gradients: Tensor = _convolution_backward(g, x, *self._weight_of(x, samples.stop - samples.start))[1]
        return gradients.view(-1, *self.shape)

    def _weight_of(self, x: Tensor, samples: int) -> tuple[Any, ...]:
        """Return a weight, of which only the shape is read, and options, for the weights of `samples` side by side."""
        at = self.geometry
        weight = x.new_empty(()).expand(samples * self.shape[0], *self.shape[1:])
        options = (at.stride, at.padding, at.dilation, False, [0] * len(at.kernel), samples * at.groups)
        return weight, None, *options, [False, True, False]

    @allocates(GRADIENTS, "aten::convolution_backward")
    def _sum_by_torch(self, scale: Tensor) -> Tensor:
        """Return Σ_b scale_b v_b as the gradient for scaled g; samples with scale 0 may hold NaN."""
        dtype = wide(self.g.dtype)
        live = scale.nonzero().flatten()
        g, x = (each.index_select(0, live).to(dtype) for each in (self.g, self.first))
        g *= scale[live].to(dtype).view(-1, *[1] * (g.dim() - 1))
        if g.dim() > len(self.shape):
            g, x = g.flatten(0, 1), x.flatten(0, 1)
        total: Tensor = _convolution_backward(g, x, *self._weight_of(x, 1))[1]
        return total

    def materialise(self) -> Tensor:
        """Return the per-sample gradients, (B, *shape), of operands rounded like the convolution's."""
        if self.by_kernel:
            return self.kept().values
        with rounded_as_cudnn(self.g.device, "conv"):
            pieces = self._chunks()
            if len(pieces) == 1:
                return self._gradients(pieces[0])
            values = self.g.new_empty((self.batch_size, *self.shape), dtype=stored_dtype(self.g.dtype))
            for samples in pieces:
                values[samples] = self._gradients(samples)
        return values

    @property
    def squares_wait(self) -> bool:
        return self.by_kernel and (self.in_tf32 or exact_path(self.decision.path, self.g) == DIRECT)

    def squares_of(self, members: Sequence[Any]) -> list[Tensor]:
        return conv_norms([each._product() for each in members])

    def square_parts(self) -> Tensor | None:
        return conv_products(self._product(), None)[1] if self.squares_wait else None

    def norms_squared(self) -> Tensor:
        if (parts := self.square_parts()) is not None:
            return parts.sum(1)
        if self.by_torch and self.decision.path == DIRECT:
            dtype = wide(self.g.dtype)
            pieces = slices(self.batch_size, math.prod(self.shape) * dtype.itemsize, scratch=True)
            return torch.cat([kept_norms_squared([self._by_groups(samples, dtype)]) for samples in pieces])
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

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        if self.by_kernel or self.by_torch:
            made = conv_sum(self._product(), scale).view(self.shape) if self.by_kernel else self._sum_by_torch(scale)
            return made if out is None else out.add_(made)
        return self._sum_of_patches(scale, out)

    def launch_key(self) -> tuple[object, ...]:
        return (Patches,) if self.by_kernel else ()

    def clipped_sums(
        self, members: list[Any], scale: Tensor, rows: Sequence[int], outs: Outs, *, let_go_together: bool = False
    ) -> list[Tensor]:
        if not (self.by_kernel and let_go_together):
            return super().clipped_sums(members, scale, rows, outs)
        shapes: list[tuple[int, ...]] = [each.shape for each in members]
        totals: dict[int, Tensor] = {}
        waiting = [(row, at, [members[i]._product() for i in at]) for row, at in alike(rows).items()]
        members.clear()  # x and g are freed as their products are summed
        for row, places, products in waiting:
            totals.update(zip(places, conv_sums(products, scale[row]), strict=True))
        made = [totals[at].view(shape) for at, shape in enumerate(shapes)]
        return [total if out is None else out.add_(total) for total, out in zip(made, outs, strict=True)]

    @allocates(GRADIENTS, "aten::new_zeros")
    def _sum_of_patches(self, scale: Tensor, out: Tensor | None) -> Tensor:
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


_convolution_backward = torch.ops.aten.convolution_backward
_UNDECIDED = Decision(DIRECT, "")


class ConvOptions(NamedTuple):
    """A convolution's options as one call finds them. `pad`: what is put on first, in the order of F.pad."""

    geometry: Geometry
    pad: list[int] | None
    pad_mode: str


def _options(conv: Any) -> tuple[Any, ...]:
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode


def setting_of(options: tuple[Any, ...]) -> ConvOptions:
    """Return the setting for the options of `_options`: kernel, stride, padding, dilation, groups, padding mode."""
    kernel, stride, padding, dilation, groups, mode = options
    before = _same_padding(kernel, dilation) if padding == "same" else [(0, 0)] * len(kernel)
    if not isinstance(padding, str):
        before = [(pad, pad) for pad in padding]
    # Padding that is the same on both sides and of zeros is left to the convolution; any other is put on first.
    inside = mode == "zeros" and all(left == right for left, right in before)
    pad = None if inside else [side for pair in reversed(before) for side in pair]
    left_to_it = tuple(left for left, _ in before) if inside else (0,) * len(kernel)
    geometry = Geometry(tuple(kernel), tuple(stride), left_to_it, tuple(dilation), groups)
    return ConvOptions(geometry, pad, "constant" if mode == "zeros" else mode)


class ConvTap(LayerTap):
    """Tap of a convolution. x: (B, C, *), or (B, k, C, *) if a sample has k images."""

    casts_input = True

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.convolve = next(f for cls, f in _CONVOLUTIONS.items() if isinstance(module, cls))
        self._options = _options(module)
        self._setting = self._first_setting = setting_of(self._options)
        self.min_dim = len(self._options[0]) + 2

    def setting(self) -> ConvOptions:
        """Read the options, which a model may change between calls."""
        options = _options(self.module)
        if options != self._options:
            self._options, self._setting = options, setting_of(options)
        return self._setting

    def call_original(self, x: Tensor) -> Any:
        return self.original(x) if x.dim() == self.min_dim else _apart(self.original(x.flatten(0, 1)), x)

    def prepare(self, x: Tensor) -> Tensor:
        setting = self.setting()
        if setting.pad is None:
            return x
        if x.dim() == self.min_dim:
            return F.pad(x, setting.pad, mode=setting.pad_mode)
        return _apart(F.pad(x.flatten(0, 1), setting.pad, mode=setting.pad_mode), x)

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        x, weight, bias = self.operands(x)
        if ctx.live[0] and ctx.recorder.notes_inputs:
            self.note_input(x)
        ctx.recorder.save(ctx, x if ctx.live[0] or ctx.needs_input_grad[1] else None, weight)
        ctx.geometry = at = self.setting().geometry
        images = x if x.ndim == self.min_dim else x.flatten(0, 1)
        output: Tensor = self.convolve(images, weight, bias, at.stride, at.padding, at.dilation, at.groups)
        return output if images is x else _apart(output, x)

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.recorder.saved(ctx)
        return (self._input_gradient(ctx, saved, g), *self._pieces(ctx, saved, g))

    def _pieces(self, ctx: Any, saved: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor | None, ...]:
        trains_weight, trains_bias = ctx.live
        sums = None
        if trains_bias:
            channel = g.dim() - self.min_dim + 1
            others = [dim for dim in range(1, g.dim()) if dim != channel]
            sums = g.sum(others, dtype=wide(g.dtype))
        return (saved[0], g, sums) if trains_weight else (None, None, sums)

    def _input_gradient(self, ctx: Any, saved: tuple[Tensor, Tensor], g: Tensor) -> Tensor | None:
        if not ctx.needs_input_grad[1]:
            return None
        (x, weight), at, n = saved, ctx.geometry, len(ctx.geometry.kernel)
        arguments = (at.stride, at.padding, at.dilation, False, [0] * n, at.groups, [True, False, False])
        folded = g.ndim > self.min_dim
        rows = (g.flatten(0, 1), x.flatten(0, 1)) if folded else (g, x)
        dx: Tensor = torch.ops.aten.convolution_backward(*rows, weight, None, *arguments)[0]
        return _apart(dx, x) if folded else dx

    def piece_specs(self, x: Spec, y: Spec, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        trains_weight, trains_bias = live
        channel = len(y.shape) - self.min_dim + 1
        sums = Spec((y.shape[0], y.shape[channel]), wide(y.dtype)) if trains_bias else None
        return (Spec(x.shape, y.dtype), y, sums) if trains_weight else (None, None, sums)

    def backward(self, ctx: Any, g: Tensor) -> Tensor | None:
        saved = ctx.recorder.saved(ctx)
        self._record(self._pieces(ctx, saved, g), ctx.geometry)  # takes memory that the gradient of x would share
        return self._input_gradient(ctx, saved, g)

    def is_traceable(self) -> bool:
        """Return whether a graph may hold the calls: not after an option changed, because pieces are recorded later."""
        return super().is_traceable() and self.setting() is self._first_setting

    def record(self, pieces: Sequence[Tensor | None], *, owned: bool = True) -> None:
        self._record(pieces, self.setting().geometry, owned=owned)

    def _record(self, pieces: Sequence[Tensor | None], geometry: Geometry, *, owned: bool = True) -> None:
        x, g, sums = pieces
        if sums is not None:
            self.keep(1, sums, owned=owned)
        slot = self.slots[0]
        if x is not None and g is not None and slot is not None:
            add_patches(self, slot, x, g, geometry)


def patches_of(
    tap: TapOfSamples, x: Tensor, g: Tensor, geometry: Geometry, shape: tuple[int, ...], operator: str = "conv"
) -> Patches:
    """Return the operands of a convolution's weight gradient, with the path that is chosen for them.

    operator: of cuDNN, which says how operands are rounded
    """
    patches = Patches(x, g, geometry, shape, _UNDECIDED, operator)
    patches.decision = _decide(tap, patches)
    return patches


def add_patches(
    tap: TapOfSamples, slot: Slot, x: Tensor, g: Tensor, geometry: Geometry, operator: str = "conv"
) -> None:
    """Give the engine the per-sample gradients of a convolution's weight, kept or as x and g."""
    patches = patches_of(tap, x, g, geometry, tuple(slot.parameter.shape), operator)
    slot.describe("patches", patches.decision, {"x": x.shape, "g": g.shape})
    if patches.decision.path != KEEP:
        tap.engine.add(slot, patches)
        return
    kept, dtype = patches.kept(), stored_dtype(slot.parameter.dtype)
    alone = x.shape[0] == 1 and kept.values.dtype != dtype
    tap.engine.add(slot, Kept(kept.values.to(dtype)) if alone else kept)


def _decide(tap: TapOfSamples, patches: Patches) -> Decision:
    x, g, geometry = patches.first.shape, patches.g, patches.geometry
    product, p, unfolded, freed = _product_of(x, g.shape, geometry, patches.in_tf32, patches.by_kernel)
    freed = freed if tap.shares_input is False else None
    return tap.engine.path_rules.of_product(product, g, p=p, unfolded=unfolded, width_freed=freed)


@lru_cache(maxsize=1024)  # asked by every layer in every backward pass
def _product_of(
    x: torch.Size, g: torch.Size, geometry: Geometry, in_tf32: bool, by_kernel: bool
) -> tuple[tuple[int, int, int], int, Unfolded, int | None]:
    """Return (batch, positions, d) and p of the product with patches, and the features that keeping it alone frees."""
    groups, channel = geometry.groups, len(g) - len(geometry.kernel) - 1
    d, p = x[channel] // groups * math.prod(geometry.kernel), g[channel] // groups
    length, held = math.prod(g[1:]) // g[channel], math.prod(x[1:])
    unfolded = Unfolded(held, geometry.copies, in_tf32, by_kernel, groups)
    return (x[0], length, d), p, unfolded, p + held // length if groups == 1 else None


def _is_depthwise(shape: tuple[int, ...], geometry: Geometry) -> bool:
    return shape[1] == 1 < geometry.groups


def _apart(images: Tensor, x: Tensor) -> Tensor:
    """Return images (B·k, ...) as (B, k, ...), like x."""
    return images.reshape(x.shape[0], x.shape[1], *images.shape[1:])


def _images_along_positions(rows: Tensor, images: int, groups: int) -> Tensor:
    """Return rows (b·images·groups, ·, L) as (b·groups, ·, images·L): images of a sample become positions."""
    apart = rows.reshape(-1, images, groups, *rows.shape[1:]).permute(0, 2, 3, 1, 4)
    return apart.reshape(-1, rows.shape[1], images * rows.shape[2])


def _same_padding(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the padding of padding="same": the odd element goes to the right, as in torch."""
    totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return [(total // 2, total - total // 2) for total in totals]

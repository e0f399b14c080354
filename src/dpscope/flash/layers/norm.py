"""LayerNorm and RMSNorm; GroupNorm and InstanceNorm.

y = x̂ w + b. A sample's gradients are Σ_t g_t x̂_t for w and Σ_t g_t for b: small, (B, d), taken in one pass in backward
and kept. The gradient of x comes from torch's own kernels.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from dpscope.flash.gradients.contributions import wide
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import LayerTap
from dpscope.flash.torch_side.autocast import autocast_dtype, autocast_output_dtype

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default

MOST_GROUPS = 65535
"""Of one image, for which torch's CUDA kernel gives the gradient of x: the limit of a launch's second dimension."""


# Dimensions of the input, batch and channels included.
_INSTANCE_NORM_DIMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def _takes_whole_sums(tap: LayerTap, ctx: Any) -> bool:
    """Return whether backward takes the sums itself. Those of a vector may be added up with other layers'."""
    slot = tap.slots[0] or tap.slots[-1]
    return ctx.recorder.sums_at_once or slot is None or slot.parameter.dim() != 1


class NormTap(LayerTap):
    """A normalisation by an operator that autocast may run in float32."""

    operator: str

    @property
    def eps(self) -> float:
        return cast("float", self.module.eps)

    def norm_operands(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return x, weight and bias as autocast would cast them for the operator."""
        weight: Tensor | None = self.parameters["weight"]
        bias: Tensor | None = self.parameters["bias"]
        dtype = autocast_dtype(x)
        if dtype is None or x.dtype == torch.float64:
            return x, weight, bias
        wanted = autocast_output_dtype(self.operator, x.device.type, x.dtype, dtype)
        if wanted == torch.float32:
            weight = weight if weight is None else weight.float()
            bias = bias if bias is None else bias.float()
        return x if x.dtype == wanted else x.to(wanted), weight, bias


class LayerNormTap(NormTap):
    operator = "layer_norm"

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        assert isinstance(module, nn.LayerNorm)
        super().__init__(engine, name, module)
        self.shape = list(module.normalized_shape)
        self.min_dim = len(self.shape) + 1

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        x, weight, bias = self.norm_operands(x)
        output, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return output

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_weight, needs_bias = ctx.live
        weight_sums = bias_sums = dx = None
        if needs_weight or needs_bias:
            rows, of_g = x, g
            if x.dim() != 3 or len(self.shape) != 1:
                rows = x.reshape(x.shape[0], -1, weight.numel())
                of_g = g.reshape(rows.shape)
            weight_sums, bias_sums = ctx.recorder.layer_norm_sums(
                of_g, rows, mean, rstd, whole=_takes_whole_sums(self, ctx)
            )
        if ctx.needs_input_grad[1]:
            dx = _layer_norm_backward(g, x, self.shape, mean, rstd, weight, bias, [True, False, False])[0]
        return dx, weight_sums if needs_weight else None, bias_sums if needs_bias else None


class RMSNormTap(LayerTap):
    """x̂ = x / sqrt(mean(x²) + eps), over the weight's dimensions. Also for Hugging Face's classes of that kind."""

    names = ("weight",)

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        weight = module._parameters["weight"]
        assert weight is not None
        self.min_dim = weight.dim() + 1
        self._eps_name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, self.parameters["weight"])
        ctx.eps = getattr(self.module, self._eps_name, None)
        output: Tensor = self.original(x)
        return output

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        width = weight.numel()
        eps = torch.finfo(wide(x.dtype)).eps if ctx.eps is None else ctx.eps
        dx, sums = ctx.recorder.rms_norm_gradients(
            g.reshape(g.shape[0], -1, width),
            x.reshape(g.shape[0], -1, width),
            weight.reshape(width),
            eps,
            needs_x=ctx.needs_input_grad[1],
            needs_weight=ctx.live[0],
            whole=_takes_whole_sums(self, ctx),
        )
        return None if dx is None else dx.view(x.shape), sums


class GroupNormTap(NormTap):
    """Folding the batch into the channels makes torch's own kernel give per-sample sums for w and b.

    x: (B, C, *) seen as (1, B·C, *) with B·G groups is the same normalisation, and its weight gradient, one number a
    channel, is then (B·C): Σ over positions for each sample apart.
    """

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        if isinstance(module, nn.GroupNorm):
            self.operator, self._groups_name = "group_norm", "num_groups"
        else:
            assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
            self.operator, self._groups_name = "instance_norm", "num_features"
            self.min_dim = next(dim for cls, dim in _INSTANCE_NORM_DIMS.items() if isinstance(module, cls))

    def blocks_in(self, x: Tensor, batch: int) -> Tensor | None:
        return None  # a leading dimension more would be taken for channels

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        x, weight, bias = self.norm_operands(x)
        x = x.contiguous()
        batch, channels = x.shape[:2]
        positions = math.prod(x.shape[2:])
        ctx.groups = groups = getattr(self.module, self._groups_name)
        output, mean, rstd = torch.native_group_norm(x, weight, bias, batch, channels, positions, groups, self.eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return output

    def gradients(self, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        needs_x, (needs_weight, needs_bias) = ctx.needs_input_grad[1], ctx.live
        batch, channels = x.shape[:2]
        g, positions = g.to(x.dtype).contiguous(), math.prod(x.shape[2:])  # the kernel takes g to be contiguous
        needs_sums, folds = needs_weight or needs_bias, batch * ctx.groups <= MOST_GROUPS
        dx, weight_sums, bias_sums = _group_norm_backward(
            g,  # the sizes that follow count, not the shapes of g and x
            x,
            mean.reshape(1, -1),
            rstd.reshape(1, -1),
            None if weight is None else weight.expand(batch, -1).reshape(-1),  # `repeat` takes the host longer
            1,
            batch * channels,
            positions,
            batch * ctx.groups,
            [needs_x and folds, needs_sums, needs_sums],
        )
        if needs_x and not folds:
            apart = (mean, rstd, weight, batch, channels, positions, ctx.groups, [True, False, False])
            dx = _group_norm_backward(g, x, *apart)[0]
        return (
            dx if needs_x else None,
            weight_sums.view(batch, channels) if needs_weight else None,
            bias_sums.view(batch, channels) if needs_bias else None,
        )

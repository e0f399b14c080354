"""What each kernel should compute, written as dumbly as possible in float64: one sample at a time, no tiles.

They compute where their inputs are, so that the tests on a GPU can use them at realistic sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpscope.flash.kernels.gram_units import GramUnit


def gram_norms_squared(units: list[GramUnit]) -> Tensor:
    """Forms every per-sample gradient and squares it."""
    batch = units[0].gs[0].shape[0]
    total = torch.zeros(batch, dtype=torch.float64, device=units[0].gs[0].device)
    for unit in units:
        for b in range(batch):
            g = torch.cat([part[b].double() for part in unit.gs], dim=1)
            if unit.ids is None:
                x = torch.cat([part[b].double() for part in unit.xs], dim=1)
            else:
                ids = unit.ids[b]
                x = torch.nn.functional.one_hot(ids, int(ids.max()) + 1).double()
                if unit.padding_idx is not None:
                    x[ids == unit.padding_idx] = 0
            total[b] += (g.T @ x).square().sum()
    return total


def lengths(unit: GramUnit) -> Tensor:
    """Σ_t ‖g_t‖‖x_t‖, per sample."""
    g, x = (torch.cat([part.double() for part in side], dim=2) for side in (unit.gs, unit.xs))
    return (g.norm(dim=2) * x.norm(dim=2)).sum(1)


def scaled_sum(g: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Adds up the samples that have a factor, one by one."""
    total = torch.zeros(g.shape[2], x.shape[2], dtype=torch.float64, device=g.device)
    for b in range(g.shape[0]):
        if scale[b] != 0:
            total += scale[b].double() * (g[b].double().T @ x[b].double())
    return total


def kept_norms_squared(values: list[Tensor]) -> Tensor:
    squares = [[v[b].double().square().sum() for v in values] for b in range(len(values[0]))]
    return torch.stack([torch.stack(own).sum() for own in squares])


def kept_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Adds up the samples that have a factor, one by one."""
    total = torch.zeros(values.shape[1:], dtype=torch.float64, device=values.device)
    for factor, value in zip(factors.double(), values.double(), strict=True):
        if factor != 0:
            total += factor * value
    return total


def layer_norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Position by position."""
    g, x, mean, rstd = (tensor.double() for tensor in (g, x, mean, rstd))
    dgamma, dbeta = torch.zeros_like(g[:, 0]), torch.zeros_like(g[:, 0])
    for t in range(g.shape[1]):
        dgamma += g[:, t] * (x[:, t] - mean[:, t, None]) * rstd[:, t, None]
        dbeta += g[:, t]
    return dgamma, dbeta


def optimizer_step(
    kind: type[torch.optim.Optimizer], params: list[Tensor], gradients: list[list[Tensor]], **options: object
) -> list[Tensor]:
    """What torch.optim makes of `params` after one step for each entry of `gradients`."""
    leaves = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = kind(leaves, **options)  # type: ignore[call-arg]
    for gradient in gradients:
        for leaf, grad in zip(leaves, gradient, strict=True):
            leaf.grad = grad.to(leaf.dtype).clone()
        optimizer.step()
    return [leaf.detach() for leaf in leaves]

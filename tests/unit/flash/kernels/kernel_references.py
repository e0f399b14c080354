"""What each kernel should compute, written as dumbly as possible in float64: one sample at a time, no tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from dpscope.flash.kernels.gram_norms import GramUnit


def gram_norms_squared(units: list[GramUnit]) -> Tensor:
    """Forms every per-sample gradient and squares it."""
    batch = units[0].batch
    total = torch.zeros(batch, dtype=torch.float64)
    for unit in units:
        for b in range(batch):
            g = torch.cat([part[b].double().cpu() for part in unit.gs], dim=1)
            if unit.ids is None:
                x = torch.cat([part[b].double().cpu() for part in unit.xs], dim=1)
            else:
                ids = unit.ids[b].cpu()
                x = torch.nn.functional.one_hot(ids, int(ids.max()) + 1).double()
                if unit.padding_idx is not None:
                    x[ids == unit.padding_idx] = 0
            total[b] += (g.T @ x).square().sum()
    return total


def scaled_sum(g: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Adds up the samples that have a factor, one by one."""
    total = torch.zeros(g.shape[2], x.shape[2], dtype=torch.float64)
    for b in range(g.shape[0]):
        if scale[b] != 0:
            total += scale[b].double().cpu() * (g[b].double().cpu().T @ x[b].double().cpu())
    return total

"""Convolutions of every geometry, and their per-sample gradients by float64 autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscope.flash.kernels.conv_products import Geometry

# kernel, stride, padding, dilation, groups, channels, outs, size, images of a sample
CASES = {
    "one element": ((1, 1), (1, 1), (0, 0), (1, 1), 1, 6, 9, (5, 7), 1),
    "one element, strided": ((1, 1), (2, 2), (0, 0), (1, 1), 1, 3, 4, (7, 8), 1),
    "one element, padded": ((1, 1), (2, 1), (1, 2), (1, 1), 2, 4, 4, (4, 5), 2),
    "three by three": ((3, 3), (1, 1), (1, 1), (1, 1), 1, 5, 20, (6, 7), 1),
    "odd": ((3, 2), (2, 1), (1, 0), (1, 2), 2, 6, 8, (9, 8), 1),
    "larger than the image": ((5, 5), (3, 3), (2, 2), (1, 1), 1, 2, 3, (3, 4), 1),
    "groups of one": ((3, 3), (1, 1), (1, 1), (1, 1), 4, 4, 8, (5, 5), 1),
    "a line": ((3,), (2,), (2,), (2,), 1, 4, 5, (13,), 1),
    "a line, one element": ((1,), (1,), (0,), (1,), 1, 3, 17, (7,), 1),
    "several images": ((3, 3), (1, 1), (1, 1), (1, 1), 1, 3, 4, (5, 5), 3),
}


def operands(name: str, batch: int = 3, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    kernel, stride, padding, dilation, groups, channels, outs, size, images = CASES[name]
    geometry = Geometry(kernel, stride, padding, dilation, groups)
    lead = (batch,) if images == 1 else (batch, images)
    x = torch.randn(*lead, channels, *size, device=device).to(dtype)
    shape = (outs, channels // groups, *kernel)
    rows = x if images == 1 else x.flatten(0, 1)
    out = _convolve(rows.float(), torch.zeros(shape, device=device), geometry)
    return x, torch.randn(*lead, *out.shape[1:], device=device).to(dtype), geometry, shape


def _convolve(x: Tensor, weight: Tensor, at: Geometry) -> Tensor:
    convolve = (F.conv1d, F.conv2d)[len(at.kernel) - 1]
    return convolve(x, weight, None, at.stride, at.padding, at.dilation, at.groups)


def exact(x: Tensor, g: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape), by float64 autograd, one sample after the other."""
    found = []
    for images, gradients in zip(x.double(), g.double(), strict=True):
        alone = images.dim() == len(geometry.kernel) + 1
        weight = torch.zeros(shape, dtype=torch.float64, device=x.device, requires_grad=True)
        y = _convolve(images[None] if alone else images, weight, geometry)
        found.append(torch.autograd.grad(y, weight, gradients[None] if alone else gradients)[0])
    return torch.stack(found) if found else x.new_empty((0, *shape), dtype=torch.float64)

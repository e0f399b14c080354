"""The derivative of weights whose rows are standardised, normalised or scaled, applied to many gradients at once.

For q made of a weight w, both (O, n), and E_o an orthonormal basis of span(1, w_o), suppose that for every row o

    Jᵀv = a_o v_o + E_o N_o E_oᵀ v_o

as it is for (w - mean)/std, w/‖w‖ and γ_o·w, with any constants in them and by whatever operators. Four probes through
autograd then give a and N and show whether the form holds, for any number of samples: two probes are E itself, one is
orthogonal to it, and one is random. A linear map that has this form for a random vector has it for all. The gradients
of a row without this form are NaN, so that no sample has a share in such a step. A weight that is clamped, for example,
may reach its bounds at any time. On a GPU this is known a step or two later, because the host does not wait
(`Verdict`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PROBES = 4
_Event: Any = torch.cuda.Event
_TOLERANCE = 2e-5  # of a row's length: sums of thousands of float32 are known to 1e-6


class Verdict:
    """A yes or no that is made on a device, and read when it has come."""

    def __init__(self, flag: Tensor) -> None:
        self._flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=flag.is_cuda)
        self._flag.copy_(flag, non_blocking=True)
        self._event: Any = _Event() if flag.is_cuda else None
        if self._event is not None:
            self._event.record()

    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())

    def is_no(self) -> bool:
        return self.has_come() and not bool(self._flag)


def pulled_back_by_rows(w: Tensor, rows: Tensor, vjp: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return gradients of w, given those of q, (B, *shape), and which rows have the form, (O,). vjp: of k probes."""
    flat = w.detach().flatten(1)
    basis = torch.stack([torch.full_like(flat, flat.shape[1] ** -0.5), F.normalize(flat - flat.mean(1, keepdim=True))])
    generator = torch.Generator(w.device).manual_seed(w.numel())  # of its own: the model's random numbers stay
    free, other = torch.randn(2, *flat.shape, dtype=w.dtype, device=w.device, generator=generator)
    free = free - (basis * (basis * free).sum(2, keepdim=True)).sum(0)
    probes = torch.stack([*basis, free, other])
    images = vjp(probes.view(PROBES, *w.shape)).flatten(2)
    scale = (images[2] * free).sum(1) / free.square().sum(1)
    inner = torch.einsum("ion,jon->oij", basis, images[:2]) - scale.view(-1, 1, 1) * torch.eye(
        2, dtype=w.dtype, device=w.device
    )
    error = (images - _applied(probes, scale, inner, basis)).norm(dim=2)
    fits = (error <= _TOLERANCE * (images.norm(dim=2) + scale.abs() * probes.norm(dim=2))).all(0)
    return _applied(rows.flatten(2), scale.where(fits, torch.nan), inner, basis).view_as(rows), fits


def _applied(v: Tensor, scale: Tensor, inner: Tensor, basis: Tensor) -> Tensor:
    """Return a v + E N Eᵀ v. v: (B, O, n), scale: (O,), inner: (O, 2, 2), basis: (2, O, n)."""
    along = torch.bmm(v.transpose(0, 1), basis.permute(1, 2, 0))  # (O, B, 2)
    values = v * scale.unsqueeze(1)
    values.transpose(0, 1).baddbmm_(torch.bmm(along, inner.mT), basis.transpose(0, 1))
    return values

"""The derivative of weights whose rows are standardised, normalised or scaled, applied to many gradients at once.

For q made of a weight w, both (O, n), and E_o an orthonormal basis of span(1, w_o), suppose that for every row o

    Jᵀv = a_o v_o + E_o N_o E_oᵀ v_o

as it is for (w - mean)/std, w/‖w‖ and γ_o·w, with any constants in them and by whatever operators. Four probes through
autograd then give a, N and whether it is so, however many samples there are: two are E itself, one is orthogonal to it,
one is any. A linear map that has this form for a random vector has it for all. Where a row has not, its gradients are
NaN, so that no sample has a share in a step whose derivative was not this one. A weight that is clamped, say, may reach
its bounds at any time; on a GPU, which nobody waits for, that is known a step or two later (`Verdict`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscope.flash.gradients.contributions import Kept, take_rows
from dpscope.flash.gradients.paths import KEEP, PathRules
from dpscope.flash.layers.conv import Patches

PROBES = 4
FLOOR = 2.0**-12
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


class RowForm(NamedTuple):
    """Jᵀ of a weight with O rows. scale: a, (O,), NaN where a row has another form; inner: N, (O, 2, 2); basis: E."""

    scale: Tensor
    inner: Tensor
    basis: Tensor  # (2, O, n)

    def applied(self, v: Tensor) -> Tensor:
        """a v + E N Eᵀ v, for v: (B, *shape) with O rows."""
        rows = v.flatten(2)
        along = torch.bmm(rows.transpose(0, 1), self.basis.permute(1, 2, 0))  # (O, B, 2)
        values = rows * self.scale.unsqueeze(1)
        values.transpose(0, 1).baddbmm_(torch.bmm(along, self.inner.mT), self.basis.transpose(0, 1))
        return values.view(v.shape)

    def norms_squared(self, products: Tensor) -> Tensor:
        """‖Jᵀv_b‖² of (B, 3, O) float64: ‖v_o‖², and Eᵀv_o. (B,).

        Jᵀv has two orthogonal parts, a (v - EEᵀv) and E (a + N) Eᵀv. Where little of v is outside of E, rounding is
        all that is known of the first: it is taken to be at least `FLOOR` of v, which only clips more.
        """
        squares, along = products[:, 0], products[:, 1:].transpose(1, 2)  # (B, O), (B, O, 2)
        outside = torch.maximum(squares - along.square().sum(2), FLOOR * squares)
        scale = self.scale.double()
        inner = self.inner.double() + scale.view(-1, 1, 1) * torch.eye(2, dtype=scale.dtype, device=scale.device)
        inside = torch.einsum("oij,boj->boi", inner, along).square().sum(2)
        return (scale.square() * outside + inside).sum(1)


def basis_of(w: Tensor) -> Tensor:
    """(2, O, n): orthonormal vectors that span 1 and w_o."""
    flat = w.detach().flatten(1)
    return torch.stack([torch.full_like(flat, flat.shape[1] ** -0.5), F.normalize(flat - flat.mean(1, keepdim=True))])


def row_form(w: Tensor, vjp: Callable[[Tensor], Tensor]) -> tuple[RowForm, Tensor]:
    """Return the form, and which rows have it: (O,). vjp: (k, *shape) gradients of q -> (k, *shape) of w."""
    basis = basis_of(w)
    generator = torch.Generator(w.device).manual_seed(w.numel())  # of its own: the model's random numbers stay
    free, other = torch.randn(2, *basis.shape[1:], dtype=w.dtype, device=w.device, generator=generator)
    free = free - (basis * (basis * free).sum(2, keepdim=True)).sum(0)
    probes = torch.stack([*basis, free, other])
    images = vjp(probes.view(PROBES, *w.shape)).flatten(2)
    scale = (images[2] * free).sum(1) / free.square().sum(1)
    inner = torch.einsum("ion,jon->oij", basis, images[:2]) - scale.view(-1, 1, 1) * torch.eye(
        2, dtype=w.dtype, device=w.device
    )
    error = (images - RowForm(scale, inner, basis).applied(probes)).norm(dim=2)
    fits = (error <= _TOLERANCE * (images.norm(dim=2) + scale.abs() * probes.norm(dim=2))).all(0)
    return RowForm(scale.where(fits, torch.nan), inner, basis), fits


class Derived:
    """Per-sample gradients Jᵀv_b of a weight, held as those of a tensor that is made of it.

    Jᵀ is the same for all samples: Σ_b c_b Jᵀv_b = Jᵀ Σ_b c_b v_b. squared: the norms, (B,) float64.
    """

    __slots__ = ("form", "inner", "squared")
    kind = "derived"

    def __init__(self, inner: Patches | Kept, form: RowForm, squared: Tensor) -> None:
        self.inner, self.form, self.squared = inner, form, squared

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def check_unchanged(self, name: str) -> None:
        self.inner.check_unchanged(name)

    def absorb(self, other: Kept, dtype: torch.dtype) -> bool:
        return False

    def taken(self, index: Tensor) -> Derived:
        return Derived(self.inner.taken(index), self.form, take_rows(self.squared, index))

    def folded(self, each: int, rules: PathRules) -> Kept:
        return Kept(self.materialise()).folded(each, rules)

    def materialise(self) -> Tensor:
        return self.form.applied(self.inner.materialise().to(self.form.scale.dtype))

    def norms_squared(self) -> Tensor:
        return self.squared

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        total = self.form.applied(self.inner.clipped_sum(scale, None).unsqueeze(0)).squeeze(0)
        return total if out is None else out.add_(total)


def derived(patches: Patches, form: RowForm) -> Derived:
    """Return the per-sample gradients of a weight whose convolution's own are `patches`, kept if their path says so."""
    values, products = patches.products_along(form.basis, keep=patches.decision.path == KEEP)
    squared = form.norms_squared(products)
    return Derived(patches if values is None else Kept(values), form, squared)

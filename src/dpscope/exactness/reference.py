"""The reference: the gradient of each sample by itself, by plain autograd, and the clipped sums that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dpscope.audit.loop import Tensors
from dpscope.exactness.subject import Subject
from dpscope.flash.oracle import per_sample_gradients

# A parameter whose gradient vanishes against the whole (a key's bias before a softmax) has no relative error to speak
# of: what one sees of it is rounding. It is held against this share of the whole.
VANISHING_SHARE = 1e-4


@dataclass(frozen=True)
class Reference:
    """Per-sample gradients v_b, in float64 on the CPU. A sample whose gradient is not finite has none."""

    gradients: list[Tensors]
    finite: list[bool]

    @property
    def names(self) -> list[str]:
        return list(self.gradients[0])

    @cached_property
    def grams(self) -> Tensors:
        """<v_i, v_j> of each parameter: (B, B)."""
        return {name: _gram([v[name].flatten() for v in self.gradients]) for name in self.names}

    @cached_property
    def norms(self) -> Tensor:
        """(B,) ‖v_b‖ over all parameters together."""
        return torch.stack([gram.diagonal() for gram in self.grams.values()]).sum(0).sqrt()

    def factors(self, clip_norm: float) -> Tensor:
        """(B,) min(1, C/‖v_b‖)."""
        return (clip_norm / self.norms).clamp(max=1.0)

    def sums(self, factors: Tensor, names: Sequence[str] | None = None) -> Tensors:
        """Σ_b c_b v_b of each parameter."""
        return {
            name: sum((c * v[name] for c, v in zip(factors, self.gradients, strict=True)), torch.zeros(()))
            for name in (self.names if names is None else names)
        }

    def clip_norms(self, middle: float | None = None) -> list[float]:
        """At which norms a check clips: no sample exceeds the first, some the second, all the third by far.

        From the first one learns whether the gradient is right before clipping comes in, from the third every norm
        (each factor is C/‖v_b‖ then), from the second that the two cases are told apart.
        """
        norms = self.norms[self.norms > 0].sort().values
        return [4 * float(norms[-1]), middle or _middle_clip_norm(norms), float(norms[0]) / 100]


def _gram(vectors: list[Tensor]) -> Tensor:
    rows = torch.stack(vectors)
    return rows @ rows.T


def make_reference(subject: Subject) -> Reference:
    gradients = list(sample_gradients(subject, torch.float64))
    finite = [all(bool(g.isfinite().all()) for g in found.values()) for found in gradients]
    for found, whole in zip(gradients, finite, strict=True):
        if not whole:
            found.update({name: torch.zeros_like(g) for name, g in found.items()})
    return Reference(gradients, finite)


def sample_gradients(subject: Subject, dtype: torch.dtype) -> Iterator[Tensors]:
    """Computed in `dtype` one sample at a time; given in float64, on the CPU."""
    model, batch = subject.fresh(dtype)
    for found in per_sample_gradients(model, batch, lambda m, b: subject.loss(m, b).mean()):
        yield {name: g.double().cpu() for name, g in found.items()}


def _middle_clip_norm(norms: Tensor) -> float:
    """Half of the samples exceed it, half do not; all do where norms are about equal."""
    middle = (len(norms) - 1) // 2
    lower, upper = float(norms[middle]), float(norms[min(middle + 1, len(norms) - 1)])
    return (lower + upper) / 2 if lower < 0.999 * upper else 0.9 * lower


@dataclass(frozen=True)
class Fit:
    """Σ_b c_b v_b, as near to an update as it can be had: `factors` c (B,), NaN where a sample has no gradient.

    residuals   by parameter, what is left, relative to the parameter's update
    condition   by how much rounding is amplified in the factors: large where samples' gradients are nearly parallel
    """

    factors: Tensor
    residuals: dict[str, float] = field(repr=False)
    condition: float


def fit_factors(reference: Reference, update: Tensors, names: Sequence[str]) -> Fit:
    """The factors that explain the update of these parameters: least squares, gradients scaled to length one.

    Nothing of a method is needed for it but what it did to the parameters.
    """
    gram = sum((reference.grams[name] for name in names), torch.zeros(()))
    norms = gram.diagonal().sqrt()
    active = norms > 0
    scale = 1 / norms[active]
    shares = torch.stack(
        [sum((torch.sum(v[n] * update[n]) for n in names), torch.zeros(())) for v in reference.gradients]
    )
    matrix = gram[active][:, active] * scale[:, None] * scale[None, :]
    factors = torch.full_like(norms, torch.nan)
    factors[active] = scale * (torch.linalg.pinv(matrix, hermitian=True) @ (scale * shares[active]))
    residuals = relative_errors(reference.sums(factors.nan_to_num(0.0), names), update)
    return Fit(factors, residuals, float(torch.linalg.cond(matrix).sqrt()))


def relative_errors(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """‖found − wanted‖ / ‖wanted‖ by parameter of `found`; infinite where it is not a number."""
    total = math.sqrt(sum(float(wanted[name].square().sum()) for name in found))
    errors = {}
    for name, value in found.items():
        difference = float((value - wanted[name]).norm())
        size = max(float(wanted[name].norm()), VANISHING_SHARE * total)
        errors[name] = 0.0 if difference == 0 else difference / size if size and difference < math.inf else math.inf
    return errors

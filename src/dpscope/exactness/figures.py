"""Errors of a method's steps: of norms, factors and clipped sums, and of rounding alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from dpscope.audit.loop import Tensors
from dpscope.errors import UserError
from dpscope.exactness.reference import (
    Comparing,
    Reference,
    UpdateComparison,
    factors_of,
    fit_factors,
    sample_gradients,
    weighted,
)
from dpscope.exactness.report import EXACT, MethodCheck, StepErrors
from dpscope.exactness.subject import Subject

# Beyond this the samples' gradients are so nearly parallel that an update does not say who contributed what.
MAX_CONDITION = 1e3


def measure_errors(
    reference: Reference, clip_norms: Sequence[float], comparisons: Sequence[UpdateComparison]
) -> tuple[float | None, list[StepErrors]]:
    """Return the error of the norms, read off the step in which every factor is C/norm, and the errors of each step."""
    norm_error, steps = None, []
    for clip_norm, comparison in zip(clip_norms, comparisons, strict=True):
        by_parameter = comparison.errors
        fit = fit_factors(reference, comparison, reference.names)
        told = reference.norms > 0
        ratios = fit.factors[told] / reference.factors(clip_norm)[reference.names[0]][told]
        known = fit.condition < MAX_CONDITION and reference.is_flat
        norm_error = _largest(1 / ratios - 1) if known else None
        steps.append(
            StepErrors(
                clip_norm=clip_norm,
                clipped=int((reference.norms > clip_norm).sum()),
                factor_error=_largest(ratios - 1) if known else None,
                worst_parameter=max(by_parameter, key=lambda name: by_parameter[name]),
                parameter_errors=by_parameter,
            )
        )
    return norm_error, steps


def _largest(errors: Tensor) -> float:
    return float(errors.abs().nan_to_num(math.inf).max())


def measure_rounding(
    subject: Subject, reference: Reference, clip_norms: Sequence[float], dtype: torch.dtype
) -> MethodCheck:
    """Run micro-batches of one in the number format that is checked: the error of rounding alone."""
    if not clip_norms:  # no sample has a gradient of its own
        return MethodCheck("rounding", EXACT)
    found_norms = [_norms_of(found) for found in sample_gradients(subject, dtype, reference.names)]
    norms = {name: torch.tensor([each[name] for each in found_norms]) for name in reference.names}
    whole = torch.stack([each.square() for each in norms.values()]).sum(0)
    has_share = whole.isfinite() & (whole > 0)
    if not has_share.any():
        raise UserError(
            "in float32 the gradient of every sample is zero, inf or NaN, in float64 it is not: scale the loss to "
            "1e-38 to 1e38, give --dtype fp64, or look for state that the loss keeps"
        )
    factors = [factors_of(reference.clipping, norms, clip_norm) for clip_norm in clip_norms]
    comparing = [Comparing(reference.factors(clip_norm)) for clip_norm in clip_norms]
    for turn in reference.walk():
        found = list(compress(sample_gradients(subject, dtype, list(turn)), has_share.tolist()))
        for name, gradients in turn.items():
            for each, own in zip(comparing, factors, strict=True):
                each.add(name, weighted(own[name][has_share], [g[name].double() for g in found]), gradients)
    norm_error, steps = measure_errors(reference, clip_norms, [each.done(reference.names) for each in comparing])
    return MethodCheck("rounding", EXACT, norm_error=norm_error, steps=steps)


def _norms_of(gradients: Tensors) -> dict[str, float]:
    return {name: float(g.double().norm()) for name, g in gradients.items()}

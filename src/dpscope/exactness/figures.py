"""How far a method's steps are from the reference: errors of norms, factors and clipped sums, and of rounding alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpscope.audit.loop import Tensors
from dpscope.errors import UserError
from dpscope.exactness.reference import Reference, fit_factors, relative_errors, sample_gradients
from dpscope.exactness.report import EXACT, MethodCheck, StepErrors
from dpscope.exactness.subject import Subject

# Beyond this the samples' gradients are so nearly parallel that an update does not say who contributed what.
MAX_CONDITION = 1e3


def measure_errors(
    reference: Reference,
    clip_norms: Sequence[float],
    sums: Sequence[Tensors],
    errors: Sequence[dict[str, float]],
) -> tuple[float | None, list[StepErrors]]:
    """The error of norms, read off the step in which every factor is C/norm; and those of each step."""
    norm_error, steps = None, []
    for clip_norm, update, by_parameter in zip(clip_norms, sums, errors, strict=True):
        fit = fit_factors(reference, update, reference.names)
        told = reference.norms > 0
        ratios = fit.factors[told] / reference.factors(clip_norm)[told]
        known = fit.condition < MAX_CONDITION
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
    """Micro-batches of one in the number format that is checked: the yardstick's own error."""
    sums: list[Tensors] = [{} for _ in clip_norms]
    for gradient in sample_gradients(subject, dtype):
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        if not (math.isfinite(norm) and norm):
            continue  # it has no share
        for clip_norm, total in zip(clip_norms, sums, strict=True):
            for name, g in gradient.items():
                total[name] = total.get(name, 0.0) + min(1.0, clip_norm / norm) * g
    if not all(sums):
        raise UserError(
            "in float32 the gradient of every sample is zero, inf or NaN, in float64 it is not: scale the loss into "
            "float32's range (1e-38 to 1e38), give --dtype fp64, or look for state that the loss keeps between calls"
        )
    errors = [
        relative_errors(found, reference.sums(reference.factors(clip_norm)))
        for clip_norm, found in zip(clip_norms, sums, strict=True)
    ]
    norm_error, steps = measure_errors(reference, clip_norms, sums, errors)
    return MethodCheck("rounding", EXACT, norm_error=norm_error, steps=steps)

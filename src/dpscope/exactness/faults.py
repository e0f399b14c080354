"""Faults of a method, as sentences: from three updates, against the samples' own gradients.

at a clip norm that   no sample exceeds     is the gradient right, for which parameters, at which scale?
                      all exceed by far     every factor is C/norm: are the norms right? whose are they?
                      some exceed           are clipped and unclipped samples distinguished?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dpscope.audit.loop import Tensors
from dpscope.exactness.factors import FactorEvidence, explain_factors, name_scale, untie
from dpscope.exactness.reference import (
    Fit,
    Reference,
    UpdateComparison,
    find_residuals,
    fit_factors,
    make_reference,
    relative_errors,
)
from dpscope.exactness.subject import Subject
from dpscope.exactness.updates import Update
from dpscope.units import list_names

MAX_UNEXPLAINED = 1e-3  # how well a wrong factor has to be explained before the explanation is offered
MAX_UNEXPLAINED_SHARE = 0.02  # what an explanation may leave unexplained, as a share of the error


@dataclass(frozen=True)
class Evidence:
    """The updates of one method at the three clip norms, and the middle one again from another seed."""

    subject: Subject
    reference: Reference
    updates: list[Update]
    again: Update
    limits: dict[str, float]  # the relative error that each parameter is allowed
    comparisons: list[UpdateComparison]  # of the updates with the right sums
    _residuals: dict[tuple[int, tuple[str, ...]], dict[str, float]] = field(default_factory=dict, repr=False)

    @property
    def errors(self) -> list[dict[str, float]]:
        """Relative errors of the clipped sums, by step and parameter."""
        return [comparison.errors for comparison in self.comparisons]

    @cached_property
    def trusted(self) -> list[str]:
        """Parameters from which factors are read: those that move and whose unclipped sum is right, if any is."""
        moved = [name for name in self.reference.names if name not in self.unmoved]
        unclipped = self.errors[0]
        right = [name for name in moved if unclipped[name] <= self.limits[name]]
        return right if right and not self.explained(0, moved) else moved

    @cached_property
    def unmoved(self) -> list[str]:
        """Parameters with a gradient that no step touches."""
        moves = (name for name, gram in self.reference.grams.items() if gram.any())
        return [name for name in moves if not any(update.sums[name].any() for update in self.updates)]

    def fit(self, step: int, names: Sequence[str] | None = None) -> Fit:
        return fit_factors(self.reference, self.comparisons[step], self.trusted if names is None else names)

    def residuals(self, step: int, names: Sequence[str]) -> dict[str, float]:
        """Return what the fit leaves of the update of these parameters."""
        key = (step, tuple(names))
        if key not in self._residuals:
            found = find_residuals(self.reference, self.updates[step].sums, self.fit(step, names), names)
            self._residuals[key] = found
        return self._residuals[key]

    def explained(self, step: int, names: Sequence[str]) -> bool:
        """Return whether the update of these parameters is made of the samples' gradients, with one factor a sample."""
        residuals = self.residuals(step, names)
        error = max(self.errors[step][name] for name in names)
        return all(r <= max(10 * self.limits[name], MAX_UNEXPLAINED_SHARE * error) for name, r in residuals.items())

    @cached_property
    def exact(self) -> bool:
        return all(e <= self.limits[name] for errors in self.errors for name, e in errors.items())


def find_faults(evidence: Evidence) -> list[str]:
    """Return nothing if the method is exact; otherwise at least one sentence."""
    for look in (_not_finite, _random):
        if sentences := list(look(evidence)):
            return sentences
    sentences = [*_frozen(evidence), *_unmoved(evidence)]
    if evidence.exact:
        return sentences
    if evidence.reference.clipping != "flat":  # what follows reads factors off a step that clips nothing
        name, error = max(((n, e) for errors in evidence.errors for n, e in errors.items()), key=lambda each: each[1])
        rule = evidence.reference.clipping
        return [*sentences, f"the clipped sum of {name} is off by {error:.1e}: clipping={rule!r} gives another"]
    if len(evidence.unmoved) < len(evidence.reference.names):
        wrong = list(_wrong_gradients(evidence))
        sentences += [*wrong, *_wrong_factors(evidence, gradients_wrong=bool(wrong))]
    if not sentences:
        worst = max(max(errors.values()) for errors in evidence.errors)
        sentences = [f"nearly right (to {worst:.1e}), but not to the tolerance: is a part computed in lower precision?"]
    return sentences


def _not_finite(evidence: Evidence) -> Iterator[str]:
    for update in evidence.updates:
        if bad := [name for name, value in update.sums.items() if not value.isfinite().all()]:
            yield f"the step leaves inf or NaN in {list_names(bad)}"
            return


def _random(evidence: Evidence) -> Iterator[str]:
    apart = relative_errors(evidence.again.sums, evidence.updates[1].sums)
    if differing := [name for name, error in apart.items() if error > evidence.limits[name]]:
        worst = max(apart, key=lambda name: apart[name])
        yield (
            f"two runs of the same step with different seeds differ (by {apart[worst]:.1e} in {worst}; "
            f"{len(differing)} of {len(apart)} parameters): noise is added though none was asked for, or the method "
            "draws something at random"
        )


def _frozen(evidence: Evidence) -> Iterator[str]:
    if moved := evidence.updates[1].moved_frozen:
        yield f"moves parameters that are frozen (requires_grad is False): {list_names(moved)}"


def _unmoved(evidence: Evidence) -> Iterator[str]:
    unmoved = evidence.unmoved
    if len(unmoved) == len(evidence.reference.names):
        yield "no parameter moves in a step: nothing is trained"
    elif unmoved:
        yield (
            f"does not move {list_names(unmoved)}, though the loss depends on {'it' if len(unmoved) == 1 else 'them'}: "
            "forgotten, or never trained"
        )


def _wrong_gradients(evidence: Evidence) -> Iterator[str]:
    """Yield the parameters whose sum is wrong even where nothing is clipped."""
    wrong = [name for name in evidence.reference.names if name not in (*evidence.trusted, *evidence.unmoved)]
    if not wrong:
        if not evidence.explained(0, evidence.trusted):
            errors = [evidence.errors[0][name] for name in evidence.trusted]
            yield (
                f"no parameter's gradient is right even where nothing is clipped (relative errors {min(errors):.1e} "
                f"to {max(errors):.1e})"
            )
        return
    update, ties = evidence.updates[0].sums, {group[0]: group for group in evidence.subject.tied}
    for name in [name for name in wrong if name in ties]:
        yield f"tied parameter {' = '.join(ties[name])}: {_which_use(evidence, name, update[name])}"
    if others := [name for name in wrong if name not in ties]:
        worst = max(others, key=lambda name: evidence.errors[0][name])
        yield (
            f"the gradient of {list_names(others)} is wrong even where nothing is clipped: "
            f"{_how_wrong(evidence, worst, update)}"
        )


def _which_use(evidence: Evidence, name: str, update: Tensor) -> str:
    group = next(group for group in evidence.subject.tied if group[0] == name)
    sums = make_reference(untie(evidence.subject)).whole_sums()  # what each name contributes
    for use in group:
        if float((update - sums[use]).norm()) <= MAX_UNEXPLAINED * float(sums[use].norm()):
            return f"only its use as {use} is counted; the gradients of all uses add up"
    return f"its gradient is wrong (relative error {evidence.errors[0][name]:.1e}); those of other parameters are right"


def _how_wrong(evidence: Evidence, name: str, update: Tensors) -> str:
    wanted = evidence.reference.whole_sums([name])[name]
    scale = float((update[name] * wanted).sum() / wanted.square().sum())
    if float((update[name] - scale * wanted).norm()) <= MAX_UNEXPLAINED * float(wanted.norm()):
        return f"{name} is {name_scale(scale, evidence.subject.batch_size)} what it should be"
    return (
        _in_one_row(evidence, name, update[name] - wanted) or f"relative error {evidence.errors[0][name]:.1e} in {name}"
    )


def _in_one_row(evidence: Evidence, name: str, difference: Tensor) -> str | None:
    """Return whether one row of a table holds all of the error."""
    if difference.dim() < 2:
        return None
    squares = difference.flatten(1).square().sum(1)
    row = int(squares.argmax())
    if float(squares[row]) < (1 - MAX_UNEXPLAINED) * float(squares.sum()):
        return None
    owner = evidence.subject.model.get_submodule(name.rpartition(".")[0])
    if getattr(owner, "padding_idx", None) == row:
        return f"row {row} of {name}, the padding (padding_idx), is trained, and nn.Embedding keeps it as it is"
    return f"only row {row} of {name} is"


def _wrong_factors(evidence: Evidence, *, gradients_wrong: bool) -> Iterator[str]:
    trusted = evidence.trusted
    if not evidence.explained(0, trusted):
        return  # nothing to read factors from
    for step in (1, 2):
        if not evidence.explained(step, trusted):
            yield _not_flat(evidence, step, trusted)
            return
    fits = [evidence.fit(step) for step in range(3)]
    rounding = max(fit.condition for fit in fits) * max(evidence.limits.values())
    factor_evidence = FactorEvidence(
        clip_norms=[update.clip_norm for update in evidence.updates],
        factors=[fit.factors for fit in fits],
        reference=evidence.reference,
        precision=max(MAX_UNEXPLAINED, rounding),
        rounding=rounding,
        gradients_wrong=gradients_wrong,
    )
    yield from explain_factors(factor_evidence)


def _not_flat(evidence: Evidence, step: int, names: Sequence[str]) -> str:
    """Explain an update in which a sample has no single factor: each parameter may have its own."""
    sizes = {name: parameter.numel() for name, parameter in evidence.subject.model.named_parameters()}
    large = [name for name in names if sizes[name] >= 4 * evidence.subject.batch_size]
    fits = {name: evidence.fit(step, [name]) for name in large}
    own = {name: fit for name, fit in fits.items() if evidence.explained(step, [name]) and fit.condition < 1e3}
    if len(own) < 2:
        residuals = evidence.residuals(step, names)
        return (
            "the clipped update is not made of the samples' gradients with one factor a sample: samples are mixed up "
            f"before they are clipped (largest residual in {max(residuals, key=lambda name: residuals[name])})"
        )
    factors = torch.stack([fit.factors for fit in own.values()])  # (parameters, B)
    sample = int((factors.amax(0) - factors.amin(0)).nan_to_num(0.0).argmax())
    low, high = int(factors[:, sample].argmin()), int(factors[:, sample].argmax())
    shown = list(own)
    return (
        f"a sample's factor differs from parameter to parameter (sample {sample}: {factors[low, sample]:.3g} for "
        f"{shown[low]}, {factors[high, sample]:.3g} for {shown[high]}): each layer is clipped by itself, where flat "
        "clipping has one factor for the whole gradient"
    )

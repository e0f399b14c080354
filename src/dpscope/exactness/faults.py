"""Faults of a method, as sentences: from three updates, against the samples' own gradients.

at a clip norm that   no sample exceeds     is the gradient right, for which parameters, at which scale?
                      all exceed by far     every factor is C/norm: are the norms right? whose are they?
                      some exceed           are clipped and unclipped samples distinguished?
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from dpscope.audit.loop import Tensors
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

    reference: Reference
    updates: list[Update]
    again: Update
    limits: dict[str, float]  # the relative error that each parameter is allowed
    comparisons: list[UpdateComparison]  # of the updates with the right sums
    _residuals: dict[tuple[int, tuple[str, ...]], dict[str, float]] = field(default_factory=dict, repr=False)

    @property
    def subject(self) -> Subject:
        return self.reference.subject

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
    def fits(self) -> list[Fit]:
        """Factors as read off each update."""
        return [self.fit(step) for step in range(3)]

    @property
    def rounding(self) -> float:
        """The relative error of factors that rounding explains."""
        return max(fit.condition for fit in self.fits) * max(self.limits.values())

    @property
    def precision(self) -> float:
        """The relative error of factors that is near enough to name a cause."""
        return max(MAX_UNEXPLAINED, self.rounding)

    @property
    def active(self) -> Tensor:
        """(B,) True for samples that have a gradient."""
        return ~self.fits[0].factors.isnan()

    @property
    def size_of_sum(self) -> float:
        """‖Σ_b v_b‖."""
        return float(sum((gram.sum() for gram in self.reference.grams.values()), torch.zeros(())).sqrt())


def find_faults(evidence: Evidence) -> list[str]:
    """Return nothing if the method is exact; otherwise at least one sentence."""
    names, unmoved = evidence.reference.names, evidence.unmoved
    for update in evidence.updates:
        if bad := [name for name, value in update.sums.items() if not value.isfinite().all()]:
            return [f"the step leaves inf or NaN in {list_names(bad)}"]
    apart = relative_errors(evidence.again.sums, evidence.updates[1].sums)
    if differing := [name for name, error in apart.items() if error > evidence.limits[name]]:
        worst = max(apart, key=lambda name: apart[name])
        return [
            f"two runs of the same step with different seeds differ (by {apart[worst]:.1e} in {worst}; "
            f"{len(differing)} of {len(apart)} parameters): noise is added though none was asked for, or the method "
            "draws something at random"
        ]
    sentences = []
    if moved := evidence.updates[1].moved_frozen:
        sentences.append(f"moves parameters that are frozen (requires_grad is False): {list_names(moved)}")
    if len(unmoved) == len(names):
        sentences.append("no parameter moves in a step: nothing is trained")
    elif unmoved:
        sentences.append(
            f"does not move {list_names(unmoved)}, though the loss depends on {'it' if len(unmoved) == 1 else 'them'}: "
            "forgotten, or never trained"
        )
    errors = [(name, error) for errors in evidence.errors for name, error in errors.items()]
    name, largest = max(errors, key=lambda each: each[1])
    if all(error <= evidence.limits[name] for name, error in errors):
        return sentences
    if (rule := evidence.reference.clipping) != "flat":  # what follows reads factors off a step that clips nothing
        return [*sentences, f"the clipped sum of {name} is off by {largest:.1e}: clipping={rule!r} gives another"]
    if len(unmoved) < len(names):
        wrong = list(_wrong_gradients(evidence))
        sentences += [*wrong, *_wrong_factors(evidence, gradients_wrong=bool(wrong))]
    if not sentences:
        sentences = [
            f"nearly right (to {largest:.1e}), but not to the tolerance: is a part computed in lower precision?"
        ]
    return sentences


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
    sums = make_reference(_untie(evidence.subject)).whole_sums()  # what each name contributes
    for use in group:
        if float((update - sums[use]).norm()) <= MAX_UNEXPLAINED * float(sums[use].norm()):
            return f"only its use as {use} is counted; the gradients of all uses add up"
    return f"its gradient is wrong (relative error {evidence.errors[0][name]:.1e}); those of other parameters are right"


def _how_wrong(evidence: Evidence, name: str, update: Tensors) -> str:
    wanted = evidence.reference.whole_sums([name])[name]
    scale = float((update[name] * wanted).sum() / wanted.square().sum())
    if float((update[name] - scale * wanted).norm()) <= MAX_UNEXPLAINED * float(wanted.norm()):
        return f"{name} is {_name_scale(scale, evidence.subject.batch_size)} what it should be"
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


# Factors as (clip norm C, norms, evidence) -> (B,), and what it means when they fit. The first one is right.
FACTOR_RULES: tuple[tuple[Callable[[float, Tensor, Evidence], Tensor], str | None], ...] = (
    (lambda c, n, _: (c / n).clamp(max=1), None),
    (lambda c, n, _: torch.ones_like(n), "samples are not clipped: each counts the same whatever its norm"),
    (
        lambda c, n, _: (c / n).clamp(min=1),
        "factors are max(1, C/norm) where min(1, C/norm) is right: large gradients pass unclipped, small ones are "
        "blown up",
    ),
    (
        lambda c, n, _: c / n,
        "every sample is scaled to the clip norm, those below it too: this is normalisation, not clipping",
    ),
    (
        lambda c, n, _: (c / n**2).clamp(max=1),
        "factors are min(1, C/norm²): the square root of the squared norm was not taken",
    ),
    (lambda c, n, _: (1 / n).clamp(max=1), "samples are clipped at 1, whatever the clip norm"),
    (
        lambda c, n, s: (c * s.subject.batch_size / n).clamp(max=1),
        "norms are too small by the batch size: they are those of the mean loss's gradients",
    ),
    (lambda c, n, s: (c / (s.subject.batch_size * n)).clamp(max=1), "norms are too large by the batch size"),
    (
        lambda c, n, s: torch.full_like(n, min(1.0, c * s.subject.batch_size / s.size_of_sum)),
        "the batch's mean gradient is clipped, not each sample's: this is ordinary gradient clipping",
    ),
    (
        lambda c, n, s: torch.full_like(n, min(1.0, c / s.size_of_sum)),
        "the batch's summed gradient is clipped, not each sample's: this is ordinary gradient clipping",
    ),
)


def _wrong_factors(evidence: Evidence, *, gradients_wrong: bool) -> Iterator[str]:
    """Yield sentences that explain wrong factors; none if the factors are right."""
    if not evidence.explained(0, evidence.trusted):
        return  # nothing to read factors from
    for step in (1, 2):
        if not evidence.explained(step, evidence.trusted):
            yield _not_flat(evidence, step, evidence.trusted)
            return
    active, norms, precision = evidence.active, evidence.reference.norms, evidence.precision
    found = torch.stack([fit.factors[active] for fit in evidence.fits])
    for index, (rule, sentence) in enumerate(FACTOR_RULES):
        expected = torch.stack([rule(update.clip_norm, norms[active], evidence) for update in evidence.updates])
        ratios = found / expected
        scale = float(ratios.median())
        if scale <= 0 or float((ratios / scale - 1).abs().max()) > precision:
            continue
        if sentence:
            yield sentence
        if abs(scale - 1) > precision:
            yield f"every parameter's update is {_name_scale(scale, evidence.subject.batch_size)} what it should be"
        if index == 0 and abs(scale - 1) <= precision and (ratios - 1).abs().max() > evidence.rounding:
            yield from _explain_norms(evidence, 1.0, gradients_wrong)
        return
    yield from _explain_norms(evidence, float(found[0].median()), gradients_wrong)


def _name_scale(scale: float, samples: int) -> str:
    for value, name in ((samples, "the batch size"), (1 / samples, "1 / the batch size")):
        if samples > 1 and abs(scale / value - 1) < 1e-3:
            return f"{scale:.4g} times (= {name})"
    return f"{scale:.4g} times"


def _explain_norms(evidence: Evidence, scale: float, gradients_wrong: bool) -> Iterator[str]:
    """Explain factors that match no rule of the correct norms by finding the norms that they match."""
    clip_norm, norms = evidence.updates[2].clip_norm, evidence.reference.norms
    right = evidence.reference.factors(clip_norm)[evidence.reference.names[0]]
    factors = evidence.fits[2].factors / scale
    taken = clip_norm / factors  # the norms that the method must have had
    sentence = (
        _explain_by_exchange(evidence, factors, right)
        or _explain_by_omission(evidence, taken)
        or _explain_by_tying(evidence, taken)
        or _explain_by_constant(evidence, taken)
    )
    if sentence:
        yield sentence
    elif not gradients_wrong:  # from which wrong norms follow
        order = (taken / norms - 1).abs().nan_to_num(0.0).argsort(descending=True)[:3]
        off = [int(i) for i in order if evidence.active[i]]
        shown = (f"sample {i} is clipped as if its norm were {taken[i]:.4g}, it is {norms[i]:.4g}" for i in off)
        yield f"norms are wrong: {', '.join(shown)}"


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


def _explain_by_exchange(evidence: Evidence, factors: Tensor, right: Tensor) -> str | None:
    """Explain the update by correct factors applied to the wrong samples."""
    near = (factors[:, None] / right[None, :] - 1).abs() <= evidence.precision  # (found for, factor of)
    owners = near.int().argmax(1)
    moved = [i for i in range(len(right)) if not near[i, i]]
    if not moved or not near.any(1).all() or len(set(owners.tolist())) < len(right):
        return None
    shown = ", ".join(f"sample {i} has that of sample {int(owners[i])}" for i in moved[:3])
    return f"factors are given to the wrong samples: {shown}"


def _explain_by_omission(evidence: Evidence, taken: Tensor) -> str | None:
    """Explain factors by norms that lack one parameter, or all those of one name (bias)."""
    missing = evidence.reference.norms**2 - taken**2
    squares = {name: gram.diagonal() for name, gram in evidence.reference.grams.items()}
    groups: dict[str, list[str]] = {}
    for name in squares:
        groups.setdefault(name, [name])
        groups.setdefault(f".{name.rpartition('.')[2]}", []).append(name)
    total = evidence.reference.norms**2
    for names in groups.values():
        part = torch.stack([squares[name] for name in names]).sum(0)
        size = float((part / total).nan_to_num(0.0).max())
        error = float(((missing - part) / total).nan_to_num(0.0).abs().max())
        if error <= min(evidence.precision, 0.02 * size) and len(names) < len(squares):
            shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more of that name"
            return f"norms leave out {shown}: samples are clipped too little"
    return None


def _explain_by_tying(evidence: Evidence, taken: Tensor) -> str | None:
    """Explain factors by √Σ‖use‖² of each sample, (B,), in place of ‖Σ uses‖."""
    subject = evidence.subject
    if not subject.tied:
        return None
    apart = make_reference(_untie(subject)).norms
    if float((taken / apart - 1).abs().nan_to_num(0.0).max()) > evidence.precision / 10:
        return None
    ties = "; ".join(" = ".join(group) for group in subject.tied)
    return f"norms ignore that parameters are tied ({ties}): the uses' gradients add up before the norm is taken"


def _explain_by_constant(evidence: Evidence, taken: Tensor) -> str | None:
    """Explain the update by a constant that guards against division by zero."""
    extra = (taken - evidence.reference.norms)[evidence.active]
    middle = float(extra.median())
    if middle <= 0 or float((extra / middle - 1).abs().max()) > 0.1:
        return None
    return (
        f"norms are larger by about {middle:.1e}, each by the same: a constant is added, and samples are clipped a "
        "little more"
    )


def _untie(subject: Subject) -> Subject:
    """Return the same model with a parameter of its own for every name."""
    model = copy.deepcopy(subject.model)
    for first, *others in subject.tied:
        for name in others:
            owner, _, key = name.rpartition(".")
            original = model.get_parameter(first)
            twin = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
            setattr(model.get_submodule(owner), key, twin)
    return replace(subject, model=model)

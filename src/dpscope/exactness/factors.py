"""Rules that a method's clipping factors may follow when they are not min(1, C/norm)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpscope.exactness.reference import Reference, make_reference
from dpscope.exactness.subject import Subject


@dataclass(frozen=True)
class FactorEvidence:
    """Factors as read off the updates at three clip norms (none, some, all clipped), and the correct ones."""

    clip_norms: Sequence[float]
    factors: Sequence[Tensor]  # (B,) each; NaN where a sample has no gradient
    reference: Reference
    precision: float  # relative: how near is near enough to name a cause
    rounding: float  # relative: what rounding explains
    gradients_wrong: bool  # gradients were found wrong, from which wrong norms follow

    @property
    def active(self) -> Tensor:
        return ~self.factors[0].isnan()

    @property
    def samples(self) -> int:
        return len(self.reference.norms)

    @property
    def size_of_sum(self) -> float:
        """‖Σ_b v_b‖."""
        return float(sum((gram.sum() for gram in self.reference.grams.values()), torch.zeros(())).sqrt())


# Factors as (clip norm C, norms, evidence) -> (B,), and what it means when they fit. The first one is right.
FACTOR_RULES: tuple[tuple[Callable[[float, Tensor, FactorEvidence], Tensor], str | None], ...] = (
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
        lambda c, n, s: (c * s.samples / n).clamp(max=1),
        "norms are too small by the batch size: they are those of the mean loss's gradients",
    ),
    (lambda c, n, s: (c / (s.samples * n)).clamp(max=1), "norms are too large by the batch size"),
    (
        lambda c, n, s: torch.full_like(n, min(1.0, c * s.samples / s.size_of_sum)),
        "the batch's mean gradient is clipped, not each sample's: this is ordinary gradient clipping",
    ),
    (
        lambda c, n, s: torch.full_like(n, min(1.0, c / s.size_of_sum)),
        "the batch's summed gradient is clipped, not each sample's: this is ordinary gradient clipping",
    ),
)


def explain_factors(evidence: FactorEvidence) -> Iterator[str]:
    """Yield sentences that explain wrong factors; none if the factors are right."""
    active, norms = evidence.active, evidence.reference.norms
    found = torch.stack([factors[active] for factors in evidence.factors])
    for index, (rule, sentence) in enumerate(FACTOR_RULES):
        expected = torch.stack([rule(c, norms[active], evidence) for c in evidence.clip_norms])
        ratios = found / expected
        scale = float(ratios.median())
        if scale <= 0 or float((ratios / scale - 1).abs().max()) > evidence.precision:
            continue
        if sentence:
            yield sentence
        if abs(scale - 1) > evidence.precision:
            yield f"every parameter's update is {name_scale(scale, evidence.samples)} what it should be"
        if index == 0 and abs(scale - 1) <= evidence.precision and (ratios - 1).abs().max() > evidence.rounding:
            yield from _explain_norms(evidence, 1.0)
        return
    yield from _explain_norms(evidence, float(evidence.factors[0][active].median()))


def name_scale(scale: float, samples: int) -> str:
    for value, name in ((samples, "the batch size"), (1 / samples, "1 / the batch size")):
        if samples > 1 and abs(scale / value - 1) < 1e-3:
            return f"{scale:.4g} times (= {name})"
    return f"{scale:.4g} times"


def _explain_norms(evidence: FactorEvidence, scale: float) -> Iterator[str]:
    """Explain factors that match no rule of the correct norms by finding the norms that they match."""
    active, norms = evidence.active, evidence.reference.norms
    right = evidence.reference.factors(evidence.clip_norms[2])[evidence.reference.names[0]]
    factors = evidence.factors[2] / scale
    if sentence := _explain_by_exchange(evidence, factors, right):
        yield sentence
        return
    taken = evidence.clip_norms[2] / factors  # the norms that the method must have had
    for explain in (_explain_by_omission, _explain_by_tying, _explain_by_constant):
        if sentence := explain(evidence, taken):
            yield sentence
            return
    if evidence.gradients_wrong:
        return
    off = [int(i) for i in (taken / norms - 1).abs().nan_to_num(0.0).argsort(descending=True)[:3] if active[i]]
    shown = ", ".join(f"sample {i} is clipped as if its norm were {taken[i]:.4g}, it is {norms[i]:.4g}" for i in off)
    yield f"norms are wrong: {shown}"


def _explain_by_exchange(evidence: FactorEvidence, factors: Tensor, right: Tensor) -> str | None:
    """Explain the update by correct factors applied to the wrong samples."""
    near = (factors[:, None] / right[None, :] - 1).abs() <= evidence.precision  # (found for, factor of)
    owners = near.int().argmax(1)
    moved = [i for i in range(len(right)) if not near[i, i]]
    if not moved or not near.any(1).all() or len(set(owners.tolist())) < len(right):
        return None
    shown = ", ".join(f"sample {i} has that of sample {int(owners[i])}" for i in moved[:3])
    return f"factors are given to the wrong samples: {shown}"


def _explain_by_omission(evidence: FactorEvidence, taken: Tensor) -> str | None:
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


def _explain_by_tying(evidence: FactorEvidence, taken: Tensor) -> str | None:
    """Explain factors by √Σ‖use‖² of each sample, (B,), in place of ‖Σ uses‖."""
    subject = evidence.reference.subject
    if not subject.tied:
        return None
    apart = make_reference(untie(subject)).norms
    if float((taken / apart - 1).abs().nan_to_num(0.0).max()) > evidence.precision / 10:
        return None
    ties = "; ".join(" = ".join(group) for group in subject.tied)
    return f"norms ignore that parameters are tied ({ties}): the uses' gradients add up before the norm is taken"


def _explain_by_constant(evidence: FactorEvidence, taken: Tensor) -> str | None:
    """Explain the update by a constant that guards against division by zero."""
    extra = (taken - evidence.reference.norms)[evidence.active]
    middle = float(extra.median())
    if middle <= 0 or float((extra / middle - 1).abs().max()) > 0.1:
        return None
    return (
        f"norms are larger by about {middle:.1e}, each by the same: a constant is added, and samples are clipped a "
        "little more"
    )


def untie(subject: Subject) -> Subject:
    """Return the same model with a parameter of its own for every name."""
    model = copy.deepcopy(subject.model)
    for first, *others in subject.tied:
        for name in others:
            owner, _, key = name.rpartition(".")
            original = model.get_parameter(first)
            twin = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
            setattr(model.get_submodule(owner), key, twin)
    return replace(subject, model=model)

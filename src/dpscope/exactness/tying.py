"""Uses of a tied parameter: the contribution of each, and the norms if the tie is ignored."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, nn

from dpscope.exactness.reference import make_reference
from dpscope.exactness.subject import Subject


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


def norms_without_ties(subject: Subject) -> Tensor:
    """Return √Σ‖use‖² of each sample, (B,), instead of the correct ‖Σ uses‖."""
    return make_reference(untie(subject)).norms


def sums_by_use(subject: Subject, name: str) -> dict[str, Tensor]:
    """Return what each name of a tied parameter contributes to its unclipped sum."""
    group = next(group for group in subject.tied if group[0] == name)
    reference = make_reference(untie(subject))
    sums = reference.whole_sums()
    return {use: sums[use] for use in group}

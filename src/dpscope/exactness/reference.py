"""The reference: the gradient of each sample by itself, by plain autograd, and the clipped sums that follow from it.

All samples' gradients of a large model would not fit in memory. So parameters come in turns, and each turn's gradients
are computed again whenever they are needed. Where samples mix, none has a gradient of its own: each sample's loss in
the batch is held against its loss alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.audit.loop import Tensors, release_memory
from dpscope.audit.mixing import ComparedRows, ModuleValues, first_difference, recording
from dpscope.batches import cast_batch, sample_of
from dpscope.errors import UserError
from dpscope.exactness.subject import REPEATABLE, Subject
from dpscope.flash.oracle import factor_of, gradients_by_name

# A parameter whose gradient vanishes against the whole (a key's bias before a softmax) has no relative error to speak
# of: what one sees of it is rounding. It is held against this share of the whole.
VANISHING_SHARE = 1e-4
SMALL_TURN = 2**28  # bytes of samples' gradients that are held in any case
COPIES_IN_TURN = 2  # float64 copies of the model that samples' gradients may take beyond that

FactorsByName = Tensors  # of each parameter: (B,)
Turn = dict[str, list[Tensor]]  # by parameter: the gradient of each sample


@dataclass(frozen=True)
class Reference:
    """Per-sample gradients v_b, in float64 on the CPU. A sample whose gradient is not finite has none."""

    subject: Subject
    turns: list[list[str]]  # names of parameters whose gradients are held together
    clipping: str
    finite: list[bool]
    grams: Tensors  # <v_i, v_j> of each parameter: (B, B)
    _held: dict[int, Turn] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        return [name for turn in self.turns for name in turn]

    def walk(self, names: Iterable[str] | None = None) -> Iterator[Turn]:
        """Yield the gradients of all or of the given parameters in turns; the turn that is in memory comes first."""
        wanted = None if names is None else set(names)
        for number in sorted(range(len(self.turns)), key=lambda number: number not in self._held):
            if wanted is not None and wanted.isdisjoint(self.turns[number]):
                continue
            if number not in self._held:
                self._held.clear()
                release_memory()
                held = self._held[number] = {name: [] for name in self.turns[number]}
                found = sample_gradients(self.subject, torch.float64, self.turns[number])
                for gradients, finite in zip(found, self.finite, strict=True):
                    for name, gradient in gradients.items():
                        held[name].append(gradient if finite else torch.zeros_like(gradient))
            turn = {name: v for name, v in self._held[number].items() if wanted is None or name in wanted}
            yield turn
            turn.clear()  # the caller still has it while the next is computed

    def release(self) -> None:
        """Free the gradients in memory, unless all of them fit."""
        if len(self.turns) > 1:
            self._held.clear()
            release_memory()

    @cached_property
    def norms(self) -> Tensor:
        """(B,) ‖v_b‖ over all parameters together."""
        return torch.stack([gram.diagonal() for gram in self.grams.values()]).sum(0).sqrt()

    def require_gradients(self, *, mixing: bool) -> None:
        """Raise `UserError` if no sample has a gradient to clip; where samples mix, none need have its own."""
        if not any(self.finite):
            raise UserError(
                "the gradient of every sample is inf or NaN, though a loss is finite: there is nothing to clip"
            )
        if not self.norms.any() and not mixing:
            raise UserError("no parameter receives a gradient from any sample: there is nothing to clip")

    def factors(self, clip_norm: float) -> FactorsByName:
        """Return the factors of the clipping rule: (B,) for each parameter."""
        return factors_of(self.clipping, {name: gram.diagonal().sqrt() for name, gram in self.grams.items()}, clip_norm)

    def sums(self, factors: FactorsByName, names: Sequence[str] | None = None) -> Tensors:
        """Return Σ_b c_b v_b of each parameter."""
        found = {name: weighted(factors[name], v) for turn in self.walk(names) for name, v in turn.items()}
        return {name: found[name] for name in (self.names if names is None else names)}

    def whole_sums(self, names: Sequence[str] | None = None) -> Tensors:
        """Return Σ_b v_b of each parameter."""
        return self.sums(dict.fromkeys(self.names, torch.ones(self.subject.batch_size)), names)

    def clip_norms(self, middle: float | None = None) -> list[float]:
        """Return the clip norms of a check: no sample exceeds the first, some the second, all the third by far."""
        norms = self.norms[self.norms > 0].sort().values.tolist()
        if middle is None:  # half of the samples exceed it, or all of them if the norms are about equal
            lower, upper = norms[(len(norms) - 1) // 2], norms[min((len(norms) + 1) // 2, len(norms) - 1)]
            middle = (lower + upper) / 2 if lower < 0.999 * upper else 0.9 * lower
        return [4 * norms[-1], middle, norms[0] / 100]


def factors_of(clipping: str, norms: Tensors, clip_norm: float) -> FactorsByName:
    """Return the factors that a rule gives, from each parameter's norms (B,). Rules in plain words: docs/flash.md."""

    def factors(norms: Tensor, bound: float) -> Tensor:
        return norms.new_tensor([factor_of(clipping, norm, bound) for norm in norms.tolist()])

    if clipping == "per_layer":
        return {name: factors(n, clip_norm / math.sqrt(len(norms))) for name, n in norms.items()}
    of_all = torch.stack([each.square() for each in norms.values()]).sum(0).sqrt()
    return dict.fromkeys(norms, factors(of_all, clip_norm))


def weighted(factors: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return Σ_b c_b v_b of one parameter."""
    return sum((c * v for c, v in zip(factors, gradients, strict=True)), torch.zeros(()))


def make_reference(subject: Subject, clipping: str = "flat") -> Reference:
    finite = [True] * subject.batch_size
    reference = Reference(subject, _turns(subject), clipping, finite, {})
    for turn in reference.walk():
        for name, gradients in turn.items():
            flat = [gradient.flatten() for gradient in gradients]
            reference.grams[name] = torch.stack([torch.stack([a @ b for b in flat]) for a in flat])
            for sample, gradient in enumerate(gradients):
                finite[sample] &= bool(gradient.isfinite().all())
    if not all(finite):
        reference._held.clear()
        kept = torch.tensor(finite)
        for name, gram in reference.grams.items():
            reference.grams[name] = gram.where(kept[:, None] & kept[None, :], 0.0)
    return reference


def _turns(subject: Subject) -> list[list[str]]:
    sizes = {
        name: 8 * p.numel() * subject.batch_size for name, p in subject.model.named_parameters() if p.requires_grad
    }
    limit = max(SMALL_TURN, COPIES_IN_TURN * sum(sizes.values()) / subject.batch_size)
    turns: list[list[str]] = [[]]
    for name, size in sizes.items():
        if turns[-1] and sum(sizes[held] for held in turns[-1]) + size > limit:
            turns.append([])
        turns[-1].append(name)
    return turns


def sample_gradients(subject: Subject, dtype: torch.dtype, names: Sequence[str]) -> Iterator[Tensors]:
    """Yield the gradients of these parameters, one sample at a time, computed in `dtype`; on the CPU."""
    model, batch = subject.fresh(dtype)
    shapes = dict(model.named_parameters())
    for name in set(subject.trainable).difference(names):
        shapes[name].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    for index in range(subject.batch_size):
        loss = subject.loss(model, sample_of(batch, index, subject.batch_size)).mean()
        found = gradients_by_name(loss, model)
        yield {n: torch.zeros_like(shapes[n], device="cpu") if (g := found[n]) is None else g.cpu() for n in names}


@dataclass(frozen=True)
class UpdateComparison:
    """An update against Σ_b c_b v_b: by parameter, ‖difference‖ / ‖sum‖, and <v_b, update> for each sample (B,)."""

    errors: dict[str, float]
    shares: Tensors


def compare(
    reference: Reference,
    factors: Sequence[FactorsByName],
    updates_of: Callable[[Turn], Sequence[Tensors]],
    names: Iterable[str] | None = None,
) -> list[UpdateComparison]:
    """Compare updates with the sums that their factors give; `updates_of` returns those of a turn's parameters."""
    differences: list[dict[str, float]] = [{} for _ in factors]
    sizes: list[dict[str, float]] = [{} for _ in factors]
    shares: list[Tensors] = [{} for _ in factors]
    for turn in reference.walk(names):
        for step, updates in enumerate(updates_of(turn)):
            for name, gradients in turn.items():
                update, wanted = updates[name].double(), weighted(factors[step][name], gradients)
                differences[step][name], sizes[step][name] = float((update - wanted).norm()), float(wanted.norm())
                shares[step][name] = torch.stack([torch.sum(v * update) for v in gradients])
    errors = (_relative(*each) for each in zip(differences, sizes, strict=True))
    in_order = ({name: error[name] for name in reference.names if name in error} for error in errors)
    return [UpdateComparison(*each) for each in zip(in_order, shares, strict=True)]


@dataclass(frozen=True)
class Fit:
    """The c for which Σ_b c_b v_b comes nearest to an update: `factors` (B,), NaN if a sample has no gradient.

    condition   by how much rounding is amplified in the factors: large where samples' gradients are nearly parallel
    """

    factors: Tensor
    condition: float


def fit_factors(reference: Reference, comparison: UpdateComparison, names: Sequence[str]) -> Fit:
    """Return the factors that explain the update of these parameters: least squares, gradients scaled to length one.

    It needs nothing of a method but the change of the parameters.
    """
    gram = sum((reference.grams[name] for name in names), torch.zeros(()))
    shares = sum((comparison.shares[name] for name in names), torch.zeros(()))
    norms = gram.diagonal().sqrt()
    active = norms > 0
    scale = 1 / norms[active]
    matrix = gram[active][:, active] * scale[:, None] * scale[None, :]
    factors = torch.full_like(norms, torch.nan)
    factors[active] = scale * (torch.linalg.pinv(matrix, hermitian=True) @ (scale * shares[active]))
    return Fit(factors, float(torch.linalg.cond(matrix).sqrt()))


def find_residuals(reference: Reference, update: Tensors, fit: Fit, names: Sequence[str]) -> dict[str, float]:
    """Return, by parameter, the part of an update that a fit does not explain, relative to the update."""
    factors = fit.factors.nan_to_num(0.0)
    differences, sizes = {}, {}
    for turn in reference.walk(names):
        for name, gradients in turn.items():
            found, wanted = weighted(factors, gradients), update[name].double()
            differences[name], sizes[name] = float((found - wanted).norm()), float(wanted.norm())
    return _relative(differences, sizes)


def relative_errors(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Return ‖found − wanted‖ / ‖wanted‖ by parameter of `found`; infinite if it is not a number."""
    differences = {name: float((value.double() - wanted[name].double()).norm()) for name, value in found.items()}
    return _relative(differences, {name: float(wanted[name].double().norm()) for name in found})


def _relative(differences: dict[str, float], sizes: dict[str, float]) -> dict[str, float]:
    total = math.sqrt(sum(size**2 for size in sizes.values()))
    errors = {}
    for name, difference in differences.items():
        size = max(sizes[name], VANISHING_SHARE * total)
        errors[name] = 0.0 if difference == 0 else difference / size if size and difference < math.inf else math.inf
    return errors


def find_mixing(subject: Subject) -> str | None:
    """Find where the samples of a batch mix; None if they do not."""
    model, _ = subject.fresh(torch.float64)
    together, whole = _run(subject, model, subject.batch)
    for index in range(subject.batch_size):
        alone, single = _run(subject, model, sample_of(subject.batch, index, subject.batch_size))
        if torch.allclose(together[index], alone[0], rtol=REPEATABLE, atol=0, equal_nan=True):
            continue
        rows = (ComparedRows(subject.batch_size, [index]), ComparedRows(1, [0]))
        where = first_difference(whole.values, single.values, rows, tolerance=REPEATABLE)
        what = where or "in the loss: every module's output for a sample is its own"
        return (
            f"samples mix {what}. Alone, sample {index} has a loss of {float(alone[0]):.6g}; in the batch, "
            f"{float(together[index]):.6g}. A sample then has no gradient of its own and no clipping bounds its share"
        )
    return None


def _run(subject: Subject, model: nn.Module, batch: Any) -> tuple[Tensor, ModuleValues]:
    with recording(model) as trace:
        losses = subject.loss(model, cast_batch(batch, torch.float64)).detach()
    return losses, trace


def gradient_of_the_batch(subject: Subject) -> dict[str, Tensor | None]:
    """Return the gradient of the sum of all losses, by parameter; None if the loss does not depend on it."""
    model, batch = subject.fresh(torch.float64)
    found = gradients_by_name(subject.loss(model, batch).sum(), model)
    return {name: None if g is None else g.cpu().double() for name, g in found.items()}


def find_mixing_in_backward(gradient: dict[str, Tensor | None], reference: Reference) -> str | None:
    """Compare the batch's gradient with its samples' sum: only a hand-written backward pass makes them differ."""
    if not all(reference.finite):
        return None  # a sum with such a sample in it says nothing
    found = {name: g for name, g in gradient.items() if g is not None}
    (comparison,) = compare(
        reference, [dict.fromkeys(reference.names, torch.ones(len(reference.finite)))], lambda turn: [found], found
    )
    name = next((name for name, error in comparison.errors.items() if error > REPEATABLE), None)
    if name is None:
        return None
    return f"samples mix in the backward pass: the batch's gradient of {name} is not the sum of its samples'"

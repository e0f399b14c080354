"""Samples to make batches of, sizes of batches, and steps on single samples: their norms.

Samples come from the given batches; extreme ones are made from them. Sizes are those at which an engine may take
another dimension for the samples: the lengths of the model's tensors. Norms are those of unclipped steps. Sums can be
read off the updates of plain SGD only: momentum and Adam are recognised by how they move the parameters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.audit.loop import RunningLoop, StepFailed
from dpscope.batches import batch_size_of, map_tensors, tensors_of
from dpscope.errors import UserError
from dpscope.instruments.module_hooks import module_hooks
from dpscope.workloads.workload import Batch

LARGE_FACTOR = 100.0  # how many times larger than an ordinary sample a large one is


def _short(row: Tensor, others: Tensor) -> Tensor:
    """Return the sample with all positions but the first set to the smallest value seen, as padding does."""
    short, smallest = row.clone(), others.amin()
    if row.dim():
        short[1:] = 0 if row.is_floating_point() else smallest
        return short
    return row if row.is_floating_point() else smallest


ZEROS = "a sample of zeros"
# What is made of an ordinary sample: (row, all rows) -> row.
EXTREMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    ZEROS: lambda row, others: torch.zeros_like(row),
    "a sample 100 times larger": lambda row, others: row * LARGE_FACTOR if row.is_floating_point() else row,
    # A mask of ones, a sentence of one repeated word.
    "a sample that holds the largest value everywhere": lambda row, others: (
        row if row.is_floating_point() else others.amax().expand_as(row).clone()
    ),
    "a sample cut to its first position": _short,
}


class Samples:
    """Batches of any size from a pool. Tensors whose first dimension is the sample are taken row by row."""

    def __init__(self, batches: Iterable[Batch], *, max_samples: int = 8) -> None:
        self.template: Batch = None
        self.ordinary: list[int] = []
        self.extremes: dict[str, int] = {}
        self.rows: list[Tensor | None] = []  # by tensor of the template; None where it belongs to no sample
        for batch in batches:
            if self._add_batch(batch) >= max_samples:
                break
        if self.template is None or not len(self):
            raise UserError("no batch was given: an audit needs samples to make its own batches of")
        self.ordinary = list(range(min(max_samples, len(self))))
        for name, change in EXTREMES.items():
            made = [None if rows is None else change(rows[0], rows[: len(self.ordinary)]) for rows in self.rows]
            pairs = list(zip(made, self.rows, strict=True))
            if all(m is None or rows is None or torch.equal(m, rows[0]) for m, rows in pairs):
                continue  # it is the ordinary sample itself
            self.rows = [None if rows is None or m is None else torch.cat([rows, m[None]]) for m, rows in pairs]
            self.extremes[name] = len(self) - 1

    def __len__(self) -> int:
        return next((len(rows) for rows in self.rows if rows is not None), 0)

    def ordinary_batch(self, size: int) -> Batch:
        """Return ordinary samples, starting over at the first if there are too few."""
        return self.batch([self.ordinary[k % len(self.ordinary)] for k in range(size)])

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = iter(self.rows)

        def take(leaf: Tensor) -> Tensor:
            pool = next(rows)
            return leaf if pool is None else pool[torch.tensor(indices, dtype=torch.long, device=pool.device)]

        return map_tensors(self.template, take)

    def _add_batch(self, batch: Batch) -> int:
        """Add the batch's samples if they have the shapes of the first batch. Return the number of samples so far."""
        size = batch_size_of(batch)
        found = [leaf if leaf.dim() and leaf.shape[0] == size else None for leaf in tensors_of(batch)]
        shapes, others = ([None if rows is None else rows.shape[1:] for rows in each] for each in (self.rows, found))
        if self.template is None:
            self.template, self.rows = batch, found
        elif shapes == others:
            self.rows = [
                a if a is None or b is None else torch.cat([a, b]) for a, b in zip(self.rows, found, strict=True)
            ]
        return len(self)


MAX_SIZES = 5  # sizes
MAX_SAMPLES = 96  # in all of them together: what a check can afford
SMALL_BYTES = 2**29  # per-sample gradients that a method may hold in any case; of a large model,
MANY_SAMPLES = 8  # samples in a batch are enough


def sizes_to_try(loop: RunningLoop, samples: Samples) -> list[int]:
    """Return the lengths that coincide with a dimension, the likeliest first: positions, heads and groups, features."""
    model = loop.loop.model
    found = [
        *(length for rows in samples.rows if rows is not None for length in rows.shape[1:]),
        *(
            value
            for module in model.modules()
            for name, value in vars(module).items()
            if type(value) is int and ("head" in name or "group" in name)
        ),
        *_activation_lengths(loop, samples.batch(samples.ordinary[:1])),
        *(length for p in model.parameters() for length in p.shape),
    ]
    chosen: list[int] = []
    whole = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    largest = max(MANY_SAMPLES, SMALL_BYTES // max(1, whole))
    for length in dict.fromkeys(found):
        if 1 < length <= largest and sum(chosen) + length <= MAX_SAMPLES and len(chosen) < MAX_SIZES:
            chosen.append(length)
    return chosen


def _activation_lengths(loop: RunningLoop, batch: Batch) -> list[int]:
    """Return the lengths, but for the first dimension, of all tensors that go through the model's modules."""
    shapes: list[torch.Size] = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        shapes.extend(leaf.shape for leaf in pytree.tree_leaves((args, output)) if isinstance(leaf, Tensor))

    try:
        with module_hooks(loop.loop.model, after=note):
            loop.step(batch)
    except StepFailed:
        return []
    return sorted({length for shape in shapes for length in shape[1:]})


UNCLIPPED = 1e12  # a clip norm that no gradient exceeds
COMPANIONS = 4  # samples in a batch for losses that compare samples


def sample_norms(unclipped: RunningLoop, samples: Samples) -> dict[int, float]:
    """Return the finite norms, by sample. An extreme sample that the loop refuses has none."""
    norms = {index: unclipped.step(samples.batch([index])).norm for index in samples.ordinary}
    for index in samples.extremes.values():
        try:
            norms[index] = unclipped.step(samples.batch([index])).norm
        except StepFailed:  # the loop could not meet such a sample
            continue
    if not any(norms[index] for index in samples.ordinary):  # a contrastive loss: zero for a sample alone
        together, norm = samples.ordinary[:COMPANIONS], 0.0
        with suppress(StepFailed):  # the norm of the sum over the number of samples is about that of one
            norm = unclipped.step(samples.batch(together)).norm / len(together)
        norms.update(dict.fromkeys(samples.ordinary, norm))
    return {index: norm for index, norm in norms.items() if math.isfinite(norm)}


def usual_clip_norm(norms: dict[int, float], samples: Samples) -> float:
    """Return a clip norm that about half of the ordinary samples exceed."""
    known = [norm for index in samples.ordinary if (norm := norms.get(index))]
    return statistics.median(known) if known else 1.0


COLLINEAR = 1 - 1e-6
EQUAL_SPREAD = 1e-2  # relative spread of sizes that are all the same
USE_PLAIN_SGD = "for the test take torch.optim.SGD without momentum"


def require_plain_sgd(unclipped: RunningLoop, samples: Samples) -> None:
    """Raise `StepFailed` if the loop's optimizer has momentum, or moves every entry equally far (Adam)."""
    batch = samples.batch(samples.ordinary[:1])
    steps = (unclipped.step(batch).sums.values() for _ in range(2))
    first, second = (torch.cat([total.flatten() for total in sums]) for sums in steps)
    if not (first.isfinite().all() and first.any() and second.any()):
        return
    sizes = first[first != 0].abs()
    if len(sizes) > 8 and float(sizes.std() / sizes.mean()) < EQUAL_SPREAD:
        raise StepFailed(
            f"the optimizer moves every entry equally far, as Adam does in its first step: {USE_PLAIN_SGD}"
        )
    ratio = float(second.norm() / first.norm())
    # Gradients that are not cleared make it exactly 2, which is a fault and not momentum.
    if float(torch.cosine_similarity(first, second, 0)) > COLLINEAR and 1.01 < ratio < 1.999:
        raise StepFailed(f"the optimizer goes {ratio:.3g} times as far the second time (momentum): {USE_PLAIN_SGD}")

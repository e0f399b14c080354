"""Test of mixing: each sample's loss in the batch against its loss alone, and the first module that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.batches import cast_batch, sample_of
from dpscope.exactness.reference import Reference, compare
from dpscope.exactness.subject import REPEATABLE, Subject
from dpscope.flash.oracle import gradients_by_name
from dpscope.instruments.module_hooks import module_hooks
from dpscope.sentences import name_module

Outputs = list[tuple[str, list[Tensor]]]  # (module, tensors in its output), in the order modules finished


def find_mixing(subject: Subject) -> str | None:
    """Find where the samples of a batch mix; None if they do not."""
    model, _ = subject.fresh(torch.float64)
    together, whole = _run(subject, model, subject.batch)
    for index in range(subject.batch_size):
        alone, single = _run(subject, model, sample_of(subject.batch, index, subject.batch_size))
        if torch.allclose(together[index], alone[0], rtol=REPEATABLE, atol=0, equal_nan=True):
            continue
        where = _first_difference(whole, single, index, subject.batch_size)
        what = f"in {where}" if where else "in the loss: every module's output for a sample is its own"
        return (
            f"samples mix {what}. Alone, sample {index} has a loss of {float(alone[0]):.6g}; in the batch, "
            f"{float(together[index]):.6g}. A sample then has no gradient of its own and no clipping bounds its share"
        )
    return None


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
    errors = (
        compare(reference, [found], [dict.fromkeys(reference.names, torch.ones(len(reference.finite)))])[0].errors
        if found
        else {}
    )
    name = next((name for name, error in errors.items() if error > REPEATABLE), None)
    if name is None:
        return None
    return f"samples mix in the backward pass: the batch's gradient of {name} is not the sum of its samples'"


def _run(subject: Subject, model: nn.Module, batch: Any) -> tuple[Tensor, Outputs]:
    with _recording(model) as outputs:
        return subject.loss(model, cast_batch(batch, torch.float64)).detach(), outputs


@contextmanager
def _recording(model: nn.Module) -> Iterator[Outputs]:
    outputs: Outputs = []

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf.detach().clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        outputs.append((name_module(name, module), tensors))

    with module_hooks(model, after=keep):
        yield outputs


def _first_difference(whole: Outputs, single: Outputs, index: int, batch_size: int) -> str | None:
    for (name, together), (_, alone) in zip(whole, single, strict=False):
        for a, b in zip(together, alone, strict=False):
            share = _sample_part(a, b, index, batch_size)
            if share is not None and _relative_error(share.double(), b.double()) > REPEATABLE:
                return name
    return None


def _sample_part(together: Tensor, alone: Tensor, index: int, batch_size: int) -> Tensor | None:
    """Return the sample's part of a tensor, along the dimension that is `batch_size` times longer."""
    if together.dim() != alone.dim():
        return None
    longer = [d for d, (a, b) in enumerate(zip(together.shape, alone.shape, strict=True)) if a != b]
    if len(longer) != (batch_size > 1) or any(together.shape[d] != batch_size * alone.shape[d] for d in longer):
        return None
    return together.chunk(batch_size, longer[0])[index] if longer else together


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return ‖found − wanted‖ / ‖wanted‖; infinite if only one of them is zero or anything is not finite."""
    difference, size = float((found - wanted).norm()), float(wanted.norm())
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf

"""Search for the module that mixes samples: two runs of a model are compared, module by module.

The runs are of a batch and its neighbour, or of a batch and one of its samples alone. Samples that both runs hold
should have the same rows everywhere; where they first differ, samples meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.audit.loop import RunningLoop, StepFailed
from dpscope.instruments.module_hooks import module_hooks
from dpscope.units import name_module
from dpscope.workloads.workload import Batch

CHANGED = 1e-4  # relative
STEPS_TRACED = 3
Values = list[tuple[str, Tensor]]  # where, and what was there, in order


@dataclass
class ModuleValues:
    """The tensors that went through the modules in one run."""

    values: Values = field(default_factory=list)
    gradients: Values = field(default_factory=list)  # of outputs


class ComparedRows(NamedTuple):
    """The samples of a run that are compared: how many it has, and where those are."""

    samples: int
    places: Sequence[int]


RowPair = tuple[ComparedRows, ComparedRows]  # of two runs, in the same order


@contextmanager
def recording(model: nn.Module) -> Iterator[ModuleValues]:
    """Record what goes through the modules of a model."""
    trace = ModuleValues()

    def keep_gradient(label: str) -> Any:
        return lambda gradient: trace.gradients.append((label, gradient.detach().clone()))

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        label = name_module(name, module)
        inputs, outputs = (filter(_is_plain, pytree.tree_leaves(value)) for value in (args, output))
        trace.values.extend((f"before {label}", leaf.detach().clone()) for leaf in inputs)
        for leaf in outputs:
            trace.values.append((f"in {label}", leaf.detach().clone()))
            if leaf.requires_grad:
                leaf.register_hook(keep_gradient(label))

    with module_hooks(model, after=keep):
        yield trace


def _is_plain(leaf: object) -> bool:
    """Return whether a leaf is a plain tensor, outside of function transforms."""
    return isinstance(leaf, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def first_difference(first: Values, second: Values, rows: RowPair, tolerance: float = CHANGED) -> str | None:
    """Return the first place of two runs where the rows of the same samples differ; None if there is none."""
    for where, one, other in _rows_in_both(first, second, rows):
        apart = (one - other).where((one != other) & ~(one.isnan() & other.isnan()), 0.0)
        size = max(float(values.nan_to_num(0.0, 0.0, 0.0).norm()) for values in (one, other))
        if not float(apart.norm()) <= tolerance * size:
            return where
    return None


def _rows_in_both(first: Values, second: Values, rows: RowPair) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the compared rows of all tensors that have a row, or equally many, for each sample in both runs.

    Samples are along the dimension that is longer in the larger batch; the first for batches of one size. Where an
    engine runs the model more often to verify it, the step itself comes last.
    """
    count = min(len(first), len(second))
    for (where, one), (_, other) in zip(first[len(first) - count :], second[len(second) - count :], strict=True):
        if one.dim() != other.dim() or not one.numel() or not one.dim():
            continue
        along, *more = [d for d in range(one.dim()) if one.shape[d] != other.shape[d]] or [0]
        repeats = [divmod(each.shape[along], of.samples) for each, of in zip((one, other), rows, strict=True)]
        if not more and repeats[0] == repeats[1] and not repeats[0][1]:
            kept = (each.chunk(of.samples, along) for each, of in zip((one, other), rows, strict=True))
            a, b = (torch.cat([parts[i] for i in of.places]) for parts, of in zip(kept, rows, strict=True))
            yield where, a.double(), b.double()


class MeetingPlace(NamedTuple):
    """Place where samples meet, as a sentence; `found`: it names a module, or the loss."""

    sentence: str
    found: bool


def locate_mixing(loop: RunningLoop, batch: Batch, neighbour: Batch, position: int, size: int) -> MeetingPlace:
    """Return the first module whose input, output or output gradient changed for another sample."""
    try:
        first, second = _trace(loop, batch), _trace(loop, neighbour)
    except StepFailed as error:
        return MeetingPlace(f"where samples meet could not be traced: {error}", found=False)
    others = ComparedRows(size, [row for row in range(size) if row != position])
    rows = (others, others)
    if not any(True for _ in _rows_in_both(first.values, second.values, rows)):
        return MeetingPlace("which module it is cannot be traced: none is called with a batch of samples", found=False)
    if where := first_difference(first.values, second.values, rows):
        moved = "what it holds for other samples changes with the one that was replaced"
        return MeetingPlace(f"samples meet {where}: {moved}", found=True)
    if name := first_difference(first.gradients, second.gradients, rows):
        return MeetingPlace(
            f"every module's output for the other samples stays as it was, but the gradient that reaches {name} does "
            "not: samples meet in the loss, or in what follows the last module",
            found=True,
        )
    return MeetingPlace(
        "for the other samples every module's output and output gradient stay as they were: it is the method itself "
        "that gives one sample more than its share",
        found=False,
    )


def _trace(loop: RunningLoop, batch: Batch) -> ModuleValues:
    """Return the shortest of several steps, because an engine may run the model more often in some to verify it."""
    traces = []
    for _ in range(STEPS_TRACED):
        with recording(loop.loop.model) as trace:
            loop.step(batch)
        traces.append(trace)
    return min(traces, key=lambda trace: len(trace.values))

"""Search for the module that mixes samples: the first whose values for other samples change with one sample."""

from __future__ import annotations

from collections.abc import Iterator
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
Values = list[tuple[str, Tensor]]  # where, and what was there


@dataclass
class ModuleValues:
    """The tensors that went through the modules in one step, as (where, tensor), in order."""

    values: list[tuple[str, Tensor]] = field(default_factory=list)
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)  # of outputs


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
    if not any(_has_rows(a, b, size) for (_, a), (_, b) in _pairs(first.values, second.values)):
        return MeetingPlace("which module it is cannot be traced: none is called with a batch of samples", found=False)
    if where := _first_moved(first.values, second.values, position, size):
        moved = "what it holds for other samples changes with the one that was replaced"
        return MeetingPlace(f"samples meet {where}: {moved}", found=True)
    if name := _first_moved(first.gradients, second.gradients, position, size):
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


def _has_rows(a: Tensor, b: Tensor, size: int) -> bool:
    """Return whether both tensors have one row for each sample."""
    return a.shape == b.shape and a.dim() > 0 and a.numel() > 0 and a.shape[0] % size == 0


def _pairs(first: Values, second: Values) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yield the values of two steps in pairs. Where an engine verifies the model, the step itself comes last."""
    count = min(len(first), len(second))
    return zip(first[len(first) - count :], second[len(second) - count :], strict=True)


def _first_moved(first: Values, second: Values, position: int, size: int) -> str | None:
    for (name, a), (_, b) in _pairs(first, second):
        if not _has_rows(a, b, size):
            continue
        others = [row for row in range(size) if row != position]
        x, y = (t.reshape(size, -1)[others].double() for t in (a, b))
        if float((x - y).norm()) > CHANGED * max(float(x.norm()), float(y.norm())):
            return name
    return None

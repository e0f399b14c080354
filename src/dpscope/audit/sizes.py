"""Batch sizes at which an engine may take another dimension for the samples: the lengths of the model's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.audit.loop import RunningLoop, StepFailed
from dpscope.audit.samples import Samples
from dpscope.instruments.module_hooks import module_hooks
from dpscope.workloads.workload import Batch

MAX_SIZES = 5  # sizes
MAX_SAMPLES = 96  # in all of them together: what a check can afford
SMALL_BYTES = 2**29  # per-sample gradients that a method may hold in any case; of a large model,
MANY_SAMPLES = 8  # samples in a batch are enough


def sizes_to_try(loop: RunningLoop, samples: Samples) -> list[int]:
    """Return the lengths that coincide with a dimension, the likeliest first: positions, heads and groups, features."""
    model = loop.loop.model
    found = [
        *(length for shape in samples.shapes() for length in shape),
        *_counts(model),
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


def _counts(model: nn.Module) -> Iterator[int]:
    """Yield attributes such as `num_heads` and `num_groups`."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int and ("head" in name or "group" in name):
                yield value


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

"""Batches of any structure: their tensors, their number of samples, and parts of them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.errors import UserError

Batch = Any
LossFn = Callable[[nn.Module, Batch], Tensor]


def batch_size_of(batch: Batch) -> int:
    """Return the length of dimension 0 of the batch's first tensor."""
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()]
    if not sizes:
        raise UserError("the batch holds no tensor whose first dimension is the sample")
    return sizes[0]


def map_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """Return the batch with every tensor in it changed, in lists, tuples, dictionaries and the like."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, UserDict):  # what tokenizers return; torch's pytrees take it for a leaf
            return type(leaf)({key: map_tensors(value, change) for key, value in leaf.items()})
        return leaf

    return pytree.tree_map(visit, batch)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return every tensor in the batch."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def sample_of(batch: Batch, index: int, size: int) -> Batch:
    """Return the batch cut down to sample `index`: tensors whose dim 0 is the batch are sliced, the rest stays."""
    return map_tensors(batch, lambda x: x[index : index + 1] if x.dim() and x.shape[0] == size else x)


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Return the batch split into at most `parts` parts of about the same size; none is empty unless the batch is."""
    size = batch_size_of(batch)
    parts = max(1, min(parts, size))
    edges = [size * part // parts for part in range(parts + 1)]

    def cut(x: Tensor, start: int, end: int) -> Tensor:
        return x[start:end] if x.dim() and x.shape[0] == size else x

    return [map_tensors(batch, partial(cut, start=start, end=end)) for start, end in pairwise(edges)]


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its floating-point tensors in another dtype."""
    return map_tensors(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)

"""The oracle: micro-batches of one, plain autograd. Slow, dumb, and what every other path is held against.

For sample b with gradient v_b over all trainable parameters together (norms in float64):

    norm_b = ||v_b||,   factor_b = min(1, C / norm_b)  (0 where norm_b is not finite),   sum = Σ_b factor_b v_b

It shares no code with the engine. The model is deep-copied first, which gives an ordinary model even where an engine
is attached, so the caller's gradients, buffers and taps are never touched.
"""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.errors import UserError

Batch = Any
LossFn = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class OracleResult:
    """`norms`, `factors`: (B,) float64. `clipped_sums`: qualified parameter name -> Σ_b factor_b v_b."""

    norms: Tensor
    factors: Tensor
    clipped_sums: dict[str, Tensor]


def batch_size_of(batch: Batch) -> int:
    """The length of dimension 0 of the batch's first tensor."""
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()]
    if not sizes:
        raise UserError("the batch holds no tensor whose first dimension is the sample")
    return sizes[0]


def map_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """The batch with every tensor in it changed: lists, tuples, dictionaries, and what behaves like a dictionary."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, UserDict):  # what tokenizers return; torch's pytrees take it for a leaf
            return type(leaf)({key: map_tensors(value, change) for key, value in leaf.items()})
        return leaf

    return pytree.tree_map(visit, batch)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Every tensor in the batch."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def sample_of(batch: Batch, index: int, size: int) -> Batch:
    """The batch cut down to sample `index`: tensors whose dim 0 is the batch are sliced, the rest stays."""
    return map_tensors(batch, lambda x: x[index : index + 1] if x.dim() and x.shape[0] == size else x)


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` of about the same size, or in fewer, so that none is empty (one, if the batch itself is)."""
    size = batch_size_of(batch)
    parts = max(1, min(parts, size))
    edges = [size * part // parts for part in range(parts + 1)]

    def cut(x: Tensor, start: int, end: int) -> Tensor:
        return x[start:end] if x.dim() and x.shape[0] == size else x

    return [map_tensors(batch, partial(cut, start=start, end=end)) for start, end in pairwise(edges)]


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    return map_tensors(batch, lambda x: x.to(dtype) if x.is_floating_point() else x)


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """By an ordinary backward pass, the only one that enters reentrant checkpoints; every .grad stays as it was.

    `torch.autograd.grad` passes by what a reentrant checkpoint holds, and gives None for it.
    """
    before = {tensor: tensor.grad for tensor in (*_leaves_of(loss), *parameters)}
    for tensor in before:
        tensor.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in parameters]
    finally:
        for tensor, gradient in before.items():
            tensor.grad = gradient


def gradients_by_name(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    """The same of a model's trainable parameters; None where the loss does not depend on one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, gradients_of(loss, list(named.values())), strict=True))


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The tensors in whose .grad a backward pass adds, as far as autograd's graph shows them."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        following = {each for each, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        nodes += following


def per_sample_gradients(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Iterator[dict[str, Tensor]]:
    """One dictionary (parameter name -> gradient) a sample, of the trainable parameters, each counted once."""
    parameters, size = dict(model.named_parameters()), batch_size_of(batch)
    for index in range(size):
        found = gradients_by_name(loss_fn(model, sample_of(batch, index, size)), model)
        yield {name: torch.zeros_like(parameters[name]) if g is None else g for name, g in found.items()}


def copy_of(model: nn.Module) -> nn.Module:
    """Return a deep copy. Weights that hooks have derived, left on modules with their history, are copied without."""
    derived = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in derived if not value.is_leaf})


def run_oracle(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    *,
    max_grad_norm: float,
    dtype: torch.dtype | None = None,
) -> OracleResult:
    """Per-sample norms, factors and clipped sums of `loss_fn(model, batch)`.

    `loss_fn` is called with one sample at a time and returns that sample's loss: for such a batch of one a `mean` and
    a `sum` over samples are the same thing. `dtype` runs the whole computation in another precision (float64 as the
    reference for a float32 model).
    """
    model = copy_of(model)
    if dtype is not None:
        model, batch = model.to(dtype), cast_batch(batch, dtype)
    norms: list[float] = []
    factors: list[float] = []
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for gradients in per_sample_gradients(model, batch, loss_fn):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        finite = math.isfinite(norm)
        factor = (1.0 if norm <= max_grad_norm else max_grad_norm / norm) if finite else 0.0
        norms.append(norm)
        factors.append(factor)
        if finite:
            for name, gradient in gradients.items():
                sums[name] += factor * gradient
    return OracleResult(
        norms=torch.tensor(norms, dtype=torch.float64),
        factors=torch.tensor(factors, dtype=torch.float64),
        clipped_sums=sums,
    )

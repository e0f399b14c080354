"""The oracle: micro-batches of one, plain autograd. Slow and simple: every other path is tested against it.

For sample b with gradient v_b over all trainable parameters together (norms in float64):

    norm_b = ||v_b||,   factor_b = min(1, C / norm_b)  (0 where norm_b is not finite),   sum = Σ_b factor_b v_b

for flat clipping; other rules have their own factors. It shares no code with the engine. The model is deep-copied
first, so the caller's gradients, buffers and taps are never touched. The copy is an ordinary model, even if an engine
is attached to the original.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.batches import Batch, LossFn, batch_size_of, cast_batch, sample_of


@dataclass(frozen=True)
class OracleResult:
    """Norms, factors and clipped sums of a batch, as `run_oracle` returns them.

    Args:
        norms: Gradient norms in float64, (B,).
        factors: Clipping factors in float64, (B,), or (B, groups) for rules with several groups.
        clipped_sums: Parameter name -> Σ_b factor_b v_b.

    Example:
        >>> result = run_oracle(model, (x, y), lambda model, batch: loss_fn(model(batch[0]), batch[1]), max_grad_norm=1)
        >>> print(len(result.norms), list(result.clipped_sums))
        8 ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    norms: Tensor
    factors: Tensor
    clipped_sums: dict[str, Tensor]


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Compute gradients by an ordinary backward pass, and leave every .grad unchanged.

    `torch.autograd.grad` does not enter reentrant checkpoints, and gives None for their parameters.
    """
    before = {tensor: tensor.grad for tensor in (*_leaves_of(loss), *parameters)}
    for tensor in before:
        tensor.grad = None
    # torch 2.6 takes casts that a reentrant checkpoint's forward made for those of its rerun: they have no gradient.
    torch.clear_autocast_cache()
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in parameters]
    finally:
        for tensor, gradient in before.items():
            tensor.grad = gradient


def gradients_by_name(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a model's trainable parameters; None if the loss does not depend on one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, gradients_of(loss, list(named.values())), strict=True))


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose .grad a backward pass adds to, as far as autograd's graph shows them."""
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
    """Yield one dictionary (parameter name -> gradient) a sample, of the trainable parameters, each counted once."""
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
    max_grad_norm: Any,
    clipping: str = "flat",
    rows_per_sample: int = 1,
    ids: Tensor | None = None,
    gamma: float = 0.01,
    r: float = 0.1,
    dtype: torch.dtype | None = None,
) -> OracleResult:
    """Compute per-sample norms, factors and clipped sums by plain autograd, one sample at a time.

    Args:
        model: The model. It is copied, so its gradients and buffers stay as they are.
        batch: Tensors in any structure; their first dimension is the sample.
        loss_fn: Called as `loss_fn(model, batch)` with a batch of one; returns its loss.
        max_grad_norm: The clipping bound C. A list for `clipping="per_layer"`, a dictionary for `"per_group"`.
        clipping: Name of the clipping rule. Within a step, "adaptive" is "flat".
        rows_per_sample: Number of neighbouring rows that are one sample. Its gradient is the mean over them.
        ids: Whole number for each row. Rows with equal ids are one sample, in the order of the ids.
        gamma: γ of the rule "automatic".
        r: r of the rule "psac".
        dtype: Precision to compute in, such as float64 as the reference of a float32 model.

    Returns:
        Norms, factors and clipped sums.

    Raises:
        UserError: The batch holds no tensors.

    Example:
        >>> def loss(model, batch):
        ...     return loss_fn(model(batch[0]), batch[1])
        >>> expected = run_oracle(model, (x, y), loss, max_grad_norm=1.0)
        >>> with FlashEngine(model, max_grad_norm=1.0) as engine:
        ...     loss(model, (x, y)).backward()
        ...     engine.finish()
        >>> torch.testing.assert_close(engine.norms.double(), expected.norms)
    """
    model = copy_of(model)
    if dtype is not None:
        model, batch = model.to(dtype), cast_batch(batch, dtype)
    named = [name for name, p in model.named_parameters() if p.requires_grad]
    groups, bounds = _groups(clipping, max_grad_norm, named)
    factor = partial(factor_of, clipping, gamma=gamma, r=r)
    norms: list[float] = []
    factors: list[list[float]] = []
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for gradients in _means(per_sample_gradients(model, batch, loss_fn), rows_per_sample, ids):
        squares = [0.0] * len(bounds)
        for name, gradient in gradients.items():
            squares[groups[name]] += float(gradient.double().square().sum())
        finite = list(map(math.isfinite, squares))
        norms.append(math.sqrt(sum(squares)) if all(finite) else math.inf)
        pairs = zip(squares, bounds, strict=True)
        factors.append([factor(math.sqrt(n), c) if math.isfinite(n) else 0.0 for n, c in pairs])
        for name, gradient in gradients.items():
            if finite[groups[name]]:
                sums[name] += factors[-1][groups[name]] * gradient
    return OracleResult(
        norms=torch.tensor(norms, dtype=torch.float64),
        factors=torch.tensor([each if len(each) > 1 else each[0] for each in factors], dtype=torch.float64),
        clipped_sums=sums,
    )


def factor_of(clipping: str, n: float, c: float, *, gamma: float = 0.01, r: float = 0.1) -> float:
    """Return the factor that a rule gives a sample with norm `n` under the bound `c`."""
    rules: dict[str, Callable[[], float]] = {
        "automatic": lambda: c / (n + gamma),
        "normalised": lambda: c / n if n > 1e-7 * c else 0.0,
        "psac": lambda: c / (n + r / (n + r)),
    }
    return rules.get(clipping, lambda: 1.0 if n <= c else c / n)()


def _groups(clipping: str, max_grad_norm: Any, names: list[str]) -> tuple[dict[str, int], list[float]]:
    """Return the group of each parameter, and the bound of each group."""
    if clipping == "per_layer":
        alike = isinstance(max_grad_norm, int | float)
        bounds = [max_grad_norm / math.sqrt(len(names))] * len(names) if alike else list(max_grad_norm)
        return {name: index for index, name in enumerate(names)}, bounds
    if clipping == "per_group":
        patterns = list(max_grad_norm)
        groups = {name: next(i for i, each in enumerate(patterns) if fnmatchcase(name, each)) for name in names}
        return groups, list(max_grad_norm.values())
    return dict.fromkeys(names, 0), [max_grad_norm]


def _means(rows: Iterable[dict[str, Tensor]], each: int, ids: Tensor | None) -> Iterator[dict[str, Tensor]]:
    """Yield the mean gradient of every `each` rows, or of the rows of each id."""
    if each == 1 and ids is None:
        yield from rows
        return
    samples: dict[int, list[dict[str, Tensor]]] = {}
    for number, gradients in enumerate(rows):
        samples.setdefault(number // each if ids is None else int(ids[number]), []).append(gradients)
    for _, found in sorted(samples.items()):
        yield {name: torch.stack([each[name] for each in found]).mean(0) for name in found[0]}

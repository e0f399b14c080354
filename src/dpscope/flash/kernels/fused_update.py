"""Noise, scaling and the optimizer's step in one pass over the parameters, all tensors in one launch.

With s the clipped sum of a parameter's per-sample gradients and z the noise (noise.py),

    g = (s + noise_std · z) · grad_scale        noise_std = σC, grad_scale = 1 / expected batch size

and then exactly what torch.optim does with g, in float32, rounded once where a value is stored:

    SGD         g ← g + λp;  b ← µb + (1 - dampening)g (b ← g on the first step);
                g ← b, or g + µb (nesterov);  p ← p - ηg
    Adam(W)     g ← g + λp, or p ← (1 - ηλ)p (decoupled);  m ← m + (1 - β₁)(g - m);  v ← β₂v + (1 - β₂)g²;
                p ← p - η/(1 - β₁ᵗ) · m / (√v̂ + ε),  √v̂ = √v / √(1 - β₂ᵗ), with the running maximum of v for amsgrad
    DP-AdamBC   the same, with √max(v̂ - (noise_std · grad_scale)², floor) in place of √v̂ + ε: without the share of the
                noise in v̂ (Tang et al. 2023)

s is given, or made here: with `factors` c: (B,), or (G, B) and the row of each parameter, "sums" are the per-sample
gradients v: (B, *shape) themselves, and s = Σ_b c_b v_b (see kept_gradients: where c_b is zero or NaN the sample has no
share, whatever it holds).

g, z and such an s live in registers only. Each parameter and state element is read once and written once, sums or
per-sample gradients are read once and not modified: the noise costs arithmetic that hides behind memory traffic.

Every number above is read from memory, behind the key: inside a CUDA graph `row` is where, and each replay finds there
what the host has written for it.

Served by the kernel: contiguous bfloat16, float16 and float32 tensors, dtypes of parameter, sum and state mixed freely.
float64 and other layouts take the fallback, tensor by tensor.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.kernels.kept_gradients import checked_factors, samples_at_once, sum_of_samples, sums_by_torch
from dpscope.flash.kernels.noise import HostStream, chunks, normal_block
from dpscope.flash.kernels.tensor_lists import (
    chunk_size,
    find_tensor,
    list_launches,
    noise_starts,
    number_at,
    pointer_at,
    read_words,
    size_at,
)
from dpscope.flash.kernels.triton_runtime import Backend, jit, tl, use_triton
from dpscope.vocabulary.phases import OPTIMIZER_FAMILY, Launch, announce


def sgd_numbers(
    *,
    noise_std: float,
    grad_scale: float,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
) -> list[float]:
    """Return the numbers that the kernel of SGD reads."""
    return [noise_std, grad_scale, lr, momentum, 1.0 - dampening, weight_decay]


def adam_numbers(
    *,
    noise_std: float,
    grad_scale: float,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    floor: float | None = None,
) -> list[float]:
    """Return the numbers that the kernel of Adam and AdamW reads. `step` counts from 1."""
    beta1, beta2 = betas
    shrink = 1.0 - lr * weight_decay if decoupled_weight_decay else 1.0
    coupled = 0.0 if decoupled_weight_decay else weight_decay
    corrections = [lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)]
    unbiased = [] if floor is None else [(noise_std * grad_scale) ** 2, floor]
    return [noise_std, grad_scale, *corrections, 1.0 - beta1, beta2, 1.0 - beta2, eps, shrink, coupled, *unbiased]


def fused_sgd_(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    /,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    **how: Any,
) -> None:
    """Apply torch.optim.SGD to grad = (sum + noise)·grad_scale, in place. `how`: see `sgd_numbers` and `_update`.

    momentum_buffers: one a parameter if momentum is not zero; what they hold is ignored when `first_step`.
    """
    if bool(momentum) != bool(momentum_buffers):
        raise ValueError("momentum_buffers go with momentum: give one buffer a parameter, or neither")

    def fallback(numbers: Sequence[float], grad: Tensor, param: Tensor, *state: Tensor) -> None:
        lr, momentum, undamped, weight_decay = numbers
        values = param.to(grad.dtype)
        grad = grad.add(values, alpha=weight_decay)
        if state:
            (buffer,) = state
            moved = grad if first_step else buffer.to(grad.dtype) * momentum + grad * undamped
            buffer.copy_(moved)
            grad = grad + momentum * moved if nesterov else moved
        param.copy_(values.sub(grad, alpha=lr))

    columns = [params, sums, momentum_buffers] if momentum else [params, sums]
    constants = {"MOMENTUM": momentum != 0.0, "FIRST": first_step, "NESTEROV": nesterov}
    _update(_sgd_kernel, "PSB", columns, sgd_numbers, fallback, constants, momentum=momentum, **how)


def fused_adam_(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] = (),
    /,
    *,
    amsgrad: bool = False,
    floor: float | None = None,
    **how: Any,
) -> None:
    """Apply torch.optim.Adam, or AdamW if decoupled_weight_decay, to grad = (sum + noise)·grad_scale, in place.

    max_exp_avg_sqs: one a parameter if `amsgrad`. floor: of DP-AdamBC's corrected v̂; None is Adam itself. `how`: see
    `adam_numbers` and `_update`.
    """
    if amsgrad != bool(max_exp_avg_sqs):
        raise ValueError("max_exp_avg_sqs go with amsgrad: give one tensor a parameter, or neither")

    def fallback(numbers: Sequence[float], grad: Tensor, param: Tensor, *state: Tensor) -> None:
        step_size, root_correction, weight1, beta2, weight2, eps, shrink, coupled, *unbiased = numbers
        exp_avg, exp_avg_sq, *maximum = state
        values = param.to(grad.dtype) * shrink
        grad = grad.add(param.to(grad.dtype), alpha=coupled)
        first = torch.lerp(exp_avg.to(grad.dtype), grad, weight1)
        second = (exp_avg_sq.to(grad.dtype) * beta2).addcmul_(grad, grad, value=weight2)
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        if amsgrad:
            second = torch.maximum(maximum[0].to(grad.dtype), second)
            maximum[0].copy_(second)
        if unbiased:
            denominator = (second / root_correction**2 - unbiased[0]).clamp_(min=unbiased[1]).sqrt_()
        else:
            denominator = (second.sqrt() / root_correction).add_(eps)
        param.copy_(values.addcdiv_(first, denominator, value=-step_size))

    columns = [params, sums, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
    constants = {"AMSGRAD": amsgrad, "CORRECTED": floor is not None}
    _update(_adam_kernel, "PSMV", columns, adam_numbers, fallback, constants, floor=floor, **how)


def _update(
    kernel: Any,
    typed: str,
    columns: Sequence[Sequence[Tensor]],
    numbers_of: Callable[..., list[float]],
    fallback: Callable[..., None],
    constants: dict[str, bool],
    *,
    factors: Tensor | None = None,
    factor_rows: Sequence[int] = (),
    maximize: bool = False,
    grad_scale: float = 1.0,
    noise_std: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    starts: Sequence[int] | None = None,
    row: Tensor | None = None,
    backend: Backend = "auto",
    **options: Any,
) -> None:
    """Hand each parameter to the kernel or to the fallback. `typed`: columns whose dtypes the kernel is compiled for.

    factors: (B,), or (G, B) with the row of each parameter in `factor_rows`; then `sums` holds per-sample gradients,
    (B, *shape) each, and the sums are made of them.
    (seed, offset): the step's key; starts: the number of each parameter's first element in its noise (see noise.py),
    None where these are all parameters. row: `words_of` key and numbers on the device, read in their place. options:
    the optimizer's, for `numbers_of`.
    """
    if factors is not None:
        factors = checked_factors(factors, columns[1])
        columns = [columns[0], list(map(Tensor.contiguous, columns[1])), *columns[2:]]
    given, columns = columns, _in_order(columns, backend)
    params, sums = columns[:2]
    numbers = numbers_of(noise_std=noise_std, grad_scale=grad_scale, **options)
    starts = noise_starts(params) if starts is None else starts
    samples = 1 if factors is None else factors.shape[1]
    stack: dict[str, Any] = {} if factors is None else {"stacked": 1, "samples": samples, "factor_rows": factor_rows}
    launches, left = list_launches(columns, starts, seed, offset, backend, numbers=numbers, row=row, **stack)
    for launch in launches:
        dtypes = zip(typed, [*launch.dtypes, None], strict=False)  # None: without momentum
        launch.run(
            kernel,
            factors,
            samples,
            **{f"{column}_DTYPE": dtype for column, dtype in dtypes},
            **constants,
            NOISE=noise_std != 0.0,
            MAXIMIZE=maximize,
            AT_ONCE=samples_at_once(factors),
        )
        # Autograd cannot see that a kernel wrote to them.
        torch.autograd.graph.increment_version([params[i] for i in launch.members])
        announce(partial(_described, kernel.__name__, columns, factors, launch.members))
    if left:
        if row is not None:
            (seed, offset), numbers = read_words(row)
        stream = HostStream(seed, offset, [(starts[i], params[i].numel()) for i in left], backend)
        own = None if factors is None else [factors[factor_rows[i] if factor_rows else 0] for i in range(len(params))]
        _update_by_torch(columns, left, starts, stream, numbers, fallback, own, maximize)
    for column, original in zip(columns, given, strict=True):
        if column is not sums and column is not original:
            for tensor, written in zip(original, column, strict=True):
                if tensor is not written:
                    tensor.detach().copy_(written)


def _update_by_torch(
    columns: Sequence[Sequence[Tensor]],
    left: Sequence[int],
    starts: Sequence[int],
    stream: HostStream,
    numbers: Sequence[float],
    fallback: Callable[..., None],
    factors: Sequence[Tensor] | None,
    maximize: bool,
) -> None:
    """Update the parameters `left`, which the kernels do not serve."""
    params, sums, *states = columns
    noise_std, grad_scale, *numbers = numbers
    for i in sorted(left, key=starts.__getitem__):
        param, total = params[i], sums[i]
        dtype = torch.promote_types(torch.promote_types(param.dtype, total.dtype), torch.float32)
        if factors is not None:
            total = sums_by_torch(total.reshape(len(total), param.numel()), factors[i]).view(param.shape)
        grad = total.detach().to(dtype, copy=factors is None)
        if noise_std:
            for part, number in chunks(grad, starts[i]):
                part.add_(stream.normals(number, part), alpha=noise_std)
        with torch.no_grad():
            grad.mul_(-grad_scale if maximize else grad_scale)
            fallback(numbers, grad, param, *(state[i] for state in states))


def _in_order(columns: Sequence[Sequence[Tensor]], backend: Backend) -> Sequence[Sequence[Tensor]]:
    """Return the columns with copies of parameters, and their state, whose elements are in another order.

    Weights in torch.channels_last are the common case. A kernel and a few copies take far less than torch's operators,
    which make noise in dozens of small kernels.
    """
    odd = [i for i, in_order in enumerate(map(Tensor.is_contiguous, columns[0])) if not in_order]
    if not odd or not use_triton(backend, columns[0][odd[0]].device, served=True):
        return columns
    copied = [list(column) for column in columns]
    for column in copied:
        for i in odd:
            column[i] = column[i].detach().contiguous()
    return copied


def _described(
    name: str, columns: Sequence[Sequence[Tensor]], factors: Tensor | None, members: Sequence[int]
) -> Launch:
    """Describe the launch: parameters, sums and state are read; parameters and state are written."""
    params, sums, *states = ([column[i] for i in members] for column in columns)
    return Launch(
        name=name,
        family=OPTIMIZER_FAMILY,
        reads=list(chain(params, sums, *states, [] if factors is None else [factors])),
        writes=list(chain(params, *states)),
    )


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _gradient(
    sums,
    index,
    size,
    factors,
    factor_row,
    samples,
    key,
    element,
    NOISE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (sum + noise)·scale for one block, float32, negated to maximize."""
    grad = sum_of_samples(sums, index, size, factors, factor_row, samples, AT_ONCE, BLOCK)
    if NOISE:
        grad += number_at(key, 0) * normal_block(tl.load(key), tl.load(key + 1), element, BLOCK)
    grad *= number_at(key, 1)
    if MAXIMIZE:
        grad = -grad
    return grad


@partial(jit, do_not_specialize=("n_tensors", "steps", "samples"))
def _sgd_kernel(
    key,
    chunk_starts,
    extents,
    rows,
    n_tensors,
    steps,
    factors,
    samples,
    P_DTYPE: tl.constexpr,
    S_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    NOISE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, first = find_tensor(tl.program_id(0), chunk_starts, n_tensors, steps, CHUNK)
    row = rows + tensor * (3 if MOMENTUM else 2)
    size = size_at(extents + tensor * 3, ALIGNED)
    start = tl.load(extents + tensor * 3 + 1) + first
    factor_row = tl.load(extents + tensor * 3 + 2)
    params = pointer_at(row, P_DTYPE, ALIGNED)
    sums = pointer_at(row + 1, S_DTYPE, ALIGNED)
    lr = number_at(key, 2)
    momentum = number_at(key, 3)
    undamped = number_at(key, 4)
    weight_decay = number_at(key, 5)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        inside = index < size
        param = tl.load(params + index, mask=inside, other=0.0).to(tl.float32)
        # fmt: off
        grad = _gradient(sums, index, size, factors, factor_row, samples, key, start + at,
                         NOISE, MAXIMIZE, AT_ONCE, BLOCK)
        # fmt: on
        grad += weight_decay * param
        if MOMENTUM:
            buffers = pointer_at(row + 2, B_DTYPE, ALIGNED)
            moved = grad
            if not FIRST:
                moved = momentum * tl.load(buffers + index, mask=inside, other=0.0).to(tl.float32) + undamped * grad
            tl.store(buffers + index, moved.to(B_DTYPE), mask=inside)
            grad = grad + momentum * moved if NESTEROV else moved
        tl.store(params + index, (param - lr * grad).to(P_DTYPE), mask=inside)


@partial(jit, do_not_specialize=("n_tensors", "steps", "samples"))
def _adam_kernel(
    key,
    chunk_starts,
    extents,
    rows,
    n_tensors,
    steps,
    factors,
    samples,
    P_DTYPE: tl.constexpr,
    S_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    CORRECTED: tl.constexpr,
    NOISE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, first = find_tensor(tl.program_id(0), chunk_starts, n_tensors, steps, CHUNK)
    row = rows + tensor * (5 if AMSGRAD else 4)
    size = size_at(extents + tensor * 3, ALIGNED)
    start = tl.load(extents + tensor * 3 + 1) + first
    factor_row = tl.load(extents + tensor * 3 + 2)
    params = pointer_at(row, P_DTYPE, ALIGNED)
    sums = pointer_at(row + 1, S_DTYPE, ALIGNED)
    exp_avgs = pointer_at(row + 2, M_DTYPE, ALIGNED)
    exp_avg_sqs = pointer_at(row + 3, V_DTYPE, ALIGNED)
    step_size = number_at(key, 2)
    root_correction = number_at(key, 3)
    weight1 = number_at(key, 4)
    beta2 = number_at(key, 5)
    weight2 = number_at(key, 6)
    eps = number_at(key, 7)
    shrink = number_at(key, 8)
    weight_decay = number_at(key, 9)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        inside = index < size
        param = tl.load(params + index, mask=inside, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avgs + index, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sqs + index, mask=inside, other=0.0).to(tl.float32)
        # fmt: off
        grad = _gradient(sums, index, size, factors, factor_row, samples, key, start + at,
                         NOISE, MAXIMIZE, AT_ONCE, BLOCK)
        # fmt: on
        grad += weight_decay * param
        exp_avg += weight1 * (grad - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
        tl.store(exp_avgs + index, exp_avg.to(M_DTYPE), mask=inside)
        tl.store(exp_avg_sqs + index, exp_avg_sq.to(V_DTYPE), mask=inside)
        if AMSGRAD:
            maxima = pointer_at(row + 4, V_DTYPE, ALIGNED)
            exp_avg_sq = tl.maximum(exp_avg_sq, tl.load(maxima + index, mask=inside, other=0.0).to(tl.float32))
            tl.store(maxima + index, exp_avg_sq.to(V_DTYPE), mask=inside)
        if CORRECTED:
            unbiased = exp_avg_sq / (root_correction * root_correction) - number_at(key, 10)
            denominator = tl.sqrt(tl.maximum(unbiased, number_at(key, 11)))
        else:
            denominator = tl.sqrt(exp_avg_sq) / root_correction + eps
        tl.store(params + index, (param * shrink - step_size * exp_avg / denominator).to(P_DTYPE), mask=inside)

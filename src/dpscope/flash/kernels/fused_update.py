"""Noise, scaling and the optimizer's step in one pass over the parameters, all tensors in one launch.

With s the clipped sum of a parameter's per-sample gradients and z the noise stream of philox_noise,

    g = (s + noise_std · z) · grad_scale            noise_std = σC, grad_scale = 1 / expected batch size

and then exactly what torch.optim does with g, in float32, rounded once where a value is stored:

    SGD         g ← g + λp;  b ← µb + (1 - dampening)g (b ← g on the first step);
                g ← b, or g + µb (nesterov);  p ← p - ηg
    Adam(W)     g ← g + λp, or p ← (1 - ηλ)p (decoupled);  m ← m + (1 - β₁)(g - m);  v ← β₂v + (1 - β₂)g²;
                p ← p - η/(1 - β₁ᵗ) · m / (√v̂ + ε),  √v̂ = √v / √(1 - β₂ᵗ), with the running maximum of v for amsgrad

g and z live in registers only. Each parameter and state element is read once and written once, each sum is read once
and not modified: the noise costs arithmetic that hides behind memory traffic.

Served by the kernel: contiguous bfloat16, float16 and float32 tensors, dtypes of parameter, sum and state mixed freely.
float64 and other layouts take the fallback, tensor by tensor.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.kernels.philox_noise import add_noise_, noise_chunks, normal_block, philox_normal
from dpscope.flash.kernels.tensor_lists import (
    ListLaunch,
    chunk_size,
    find_tensor,
    is_aligned,
    noise_starts,
    pointer_at,
    size_at,
)
from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES, Backend, jit, launch_on, tl, use_triton

__all__ = ["add_noise_", "fused_adam_", "fused_sgd_", "philox_normal"]


def fused_sgd_(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool = False,
    grad_scale: float = 1.0,
    noise_std: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    backend: Backend = "auto",
) -> None:
    """torch.optim.SGD on grad = (sum + noise)·grad_scale, in place.

    momentum_buffers: one a parameter if momentum is not zero; what they hold is ignored when `first_step`.
    `offset` must differ between any two calls under one seed.
    """
    if bool(momentum) != bool(momentum_buffers):
        raise ValueError("momentum_buffers go with momentum: give one buffer a parameter, or neither")

    def launch(listed: ListLaunch, arguments: tuple[Any, ...], aligned: bool) -> None:
        dtypes = listed.dtypes
        _sgd_kernel[(listed.programs,)](
            *arguments,
            noise_std,
            grad_scale,
            lr,
            momentum,
            1.0 - dampening,
            weight_decay,
            P_DTYPE=dtypes[0],
            S_DTYPE=dtypes[1],
            B_DTYPE=dtypes[2] if momentum else None,
            NOISE=noise_std != 0.0,
            MOMENTUM=momentum != 0.0,
            FIRST=first_step,
            NESTEROV=nesterov,
            MAXIMIZE=maximize,
            ALIGNED=aligned,
            **listed.cut,
            num_warps=8,
        )

    def fallback(grad: Tensor, param: Tensor, *state: Tensor) -> None:
        values = param.to(grad.dtype)
        grad = (-grad if maximize else grad).add(values, alpha=weight_decay)
        if momentum:
            (buffer,) = state
            moved = grad if first_step else buffer.to(grad.dtype) * momentum + grad * (1.0 - dampening)
            buffer.copy_(moved)
            grad = grad + momentum * moved if nesterov else moved
        param.copy_(values.sub(grad, alpha=lr))

    columns = [params, sums, momentum_buffers] if momentum else [params, sums]
    _update(columns, launch, fallback, grad_scale, noise_std, seed, offset, backend)


def fused_adam_(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] = (),
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    amsgrad: bool = False,
    maximize: bool = False,
    grad_scale: float = 1.0,
    noise_std: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    backend: Backend = "auto",
) -> None:
    """torch.optim.Adam, or AdamW if decoupled_weight_decay, on grad = (sum + noise)·grad_scale, in place.

    `step` counts from 1, this step included. max_exp_avg_sqs: one a parameter if `amsgrad`.
    `offset` must differ between any two calls under one seed.
    """
    if amsgrad != bool(max_exp_avg_sqs):
        raise ValueError("max_exp_avg_sqs go with amsgrad: give one tensor a parameter, or neither")
    beta1, beta2 = betas
    step_size = lr / (1.0 - beta1**step)
    root_correction = math.sqrt(1.0 - beta2**step)
    shrink = 1.0 - lr * weight_decay if decoupled_weight_decay else 1.0
    coupled = 0.0 if decoupled_weight_decay else weight_decay

    def launch(listed: ListLaunch, arguments: tuple[Any, ...], aligned: bool) -> None:
        dtypes = listed.dtypes
        _adam_kernel[(listed.programs,)](
            *arguments,
            noise_std,
            grad_scale,
            step_size,
            root_correction,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            eps,
            shrink,
            coupled,
            P_DTYPE=dtypes[0],
            S_DTYPE=dtypes[1],
            M_DTYPE=dtypes[2],
            V_DTYPE=dtypes[3],
            NOISE=noise_std != 0.0,
            AMSGRAD=amsgrad,
            MAXIMIZE=maximize,
            ALIGNED=aligned,
            **listed.cut,
            num_warps=8,
        )

    def fallback(grad: Tensor, param: Tensor, *state: Tensor) -> None:
        exp_avg, exp_avg_sq, *maximum = state
        values = param.to(grad.dtype) * shrink
        grad = (-grad if maximize else grad).add(param.to(grad.dtype), alpha=coupled)
        first = torch.lerp(exp_avg.to(grad.dtype), grad, 1.0 - beta1)
        second = (exp_avg_sq.to(grad.dtype) * beta2).addcmul_(grad, grad, value=1.0 - beta2)
        exp_avg.copy_(first)
        exp_avg_sq.copy_(second)
        if amsgrad:
            second = torch.maximum(maximum[0].to(grad.dtype), second)
            maximum[0].copy_(second)
        param.copy_(values.addcdiv_(first, (second.sqrt() / root_correction).add_(eps), value=-step_size))

    columns = [params, sums, exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
    _update(columns, launch, fallback, grad_scale, noise_std, seed, offset, backend)


def _update(
    columns: Sequence[Sequence[Tensor]],
    launch: Callable[[ListLaunch, tuple[Any, ...], bool], None],
    fallback: Callable[..., None],
    grad_scale: float,
    noise_std: float,
    seed: int,
    offset: int,
    backend: Backend,
) -> None:
    """Hand each parameter to the kernel or to the fallback; parameters of equal dtypes and alignment share a launch."""
    if any(len(column) != len(columns[0]) for column in columns):
        raise ValueError(f"expected one tensor a parameter in every list, got {[len(column) for column in columns]}")
    starts = noise_starts(columns[0])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        if any(tensor.shape != row[0].shape for tensor in row):
            raise ValueError(f"parameter {i}: shapes differ, {[tuple(tensor.shape) for tensor in row]}")
        served = all(tensor.is_contiguous() and tensor.dtype in TRITON_DTYPES for tensor in row)
        if use_triton(backend, row[0].device, served=served, why_not=f"parameter {i}: dtype or layout"):
            if row[0].numel():
                key = (is_aligned(*row), row[0].device, *(tensor.dtype for tensor in row))
                groups.setdefault(key, []).append(i)
            continue
        param, total, *state = row
        dtype = torch.promote_types(torch.promote_types(param.dtype, total.dtype), torch.float32)
        grad = total.detach().to(dtype, copy=True)
        if noise_std:
            for part, noise in noise_chunks(grad, starts[i], seed, offset):
                part.add_(noise.to(dtype), alpha=noise_std)
        with torch.no_grad():
            fallback(grad.mul_(grad_scale), param, *state)
    for (aligned, *_), members in groups.items():
        chosen = [[column[i] for i in members] for column in columns]
        listed = ListLaunch.over(chosen, [starts[i] for i in members], seed, offset)
        with launch_on(chosen[0][0].device):
            launch(listed, (*listed.tables, len(members), listed.steps), aligned)
        torch.autograd.graph.increment_version(chosen[0])  # autograd cannot see that a kernel wrote to them


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _gradient(
    sums,
    index,
    size,
    key,
    element,
    noise_std,
    grad_scale,
    NOISE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(sum + noise)·scale for one block, negated to maximize; float32."""
    grad = tl.load(sums + index, mask=index < size, other=0.0).to(tl.float32)
    if NOISE:
        grad += noise_std * normal_block(tl.load(key), tl.load(key + 1), element, BLOCK)
    grad *= grad_scale
    if MAXIMIZE:
        grad = -grad
    return grad


@jit
def _sgd_kernel(
    key,
    chunk_starts,
    rows,
    n_tensors,
    steps,
    noise_std,
    grad_scale,
    lr,
    momentum,
    undamped,
    weight_decay,
    P_DTYPE: tl.constexpr,
    S_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    NOISE: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, first = find_tensor(chunk_starts, n_tensors, steps, CHUNK)
    row = rows + tensor * (5 if MOMENTUM else 4)
    size = size_at(row, ALIGNED)
    start = tl.load(row + 1) + first
    params = pointer_at(row + 2, P_DTYPE, ALIGNED)
    sums = pointer_at(row + 3, S_DTYPE, ALIGNED)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        inside = index < size
        param = tl.load(params + index, mask=inside, other=0.0).to(tl.float32)
        grad = _gradient(sums, index, size, key, start + at, noise_std, grad_scale, NOISE, MAXIMIZE, BLOCK)
        grad += weight_decay * param
        if MOMENTUM:
            buffers = pointer_at(row + 4, B_DTYPE, ALIGNED)
            moved = grad
            if not FIRST:
                moved = momentum * tl.load(buffers + index, mask=inside, other=0.0).to(tl.float32) + undamped * grad
            tl.store(buffers + index, moved.to(B_DTYPE), mask=inside)
            grad = grad + momentum * moved if NESTEROV else moved
        tl.store(params + index, (param - lr * grad).to(P_DTYPE), mask=inside)


@jit
def _adam_kernel(
    key,
    chunk_starts,
    rows,
    n_tensors,
    steps,
    noise_std,
    grad_scale,
    step_size,
    root_correction,
    weight1,
    beta2,
    weight2,
    eps,
    shrink,
    weight_decay,
    P_DTYPE: tl.constexpr,
    S_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    NOISE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, first = find_tensor(chunk_starts, n_tensors, steps, CHUNK)
    row = rows + tensor * (7 if AMSGRAD else 6)
    size = size_at(row, ALIGNED)
    start = tl.load(row + 1) + first
    params = pointer_at(row + 2, P_DTYPE, ALIGNED)
    sums = pointer_at(row + 3, S_DTYPE, ALIGNED)
    exp_avgs = pointer_at(row + 4, M_DTYPE, ALIGNED)
    exp_avg_sqs = pointer_at(row + 5, V_DTYPE, ALIGNED)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        inside = index < size
        param = tl.load(params + index, mask=inside, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avgs + index, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sqs + index, mask=inside, other=0.0).to(tl.float32)
        grad = _gradient(sums, index, size, key, start + at, noise_std, grad_scale, NOISE, MAXIMIZE, BLOCK)
        grad += weight_decay * param
        exp_avg += weight1 * (grad - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad * grad
        tl.store(exp_avgs + index, exp_avg.to(M_DTYPE), mask=inside)
        tl.store(exp_avg_sqs + index, exp_avg_sq.to(V_DTYPE), mask=inside)
        if AMSGRAD:
            maxima = pointer_at(row + 6, V_DTYPE, ALIGNED)
            exp_avg_sq = tl.maximum(exp_avg_sq, tl.load(maxima + index, mask=inside, other=0.0).to(tl.float32))
            tl.store(maxima + index, exp_avg_sq.to(V_DTYPE), mask=inside)
        denominator = tl.sqrt(exp_avg_sq) / root_correction + eps
        tl.store(params + index, (param * shrink - step_size * exp_avg / denominator).to(P_DTYPE), mask=inside)

"""Per-sample gradients of biases and norm layers: sums over positions, in one read of the operands.

    bias:       dbias_b  = Σ_t g_bt                                        g: (B, T, p)
    LayerNorm:  dgamma_b = Σ_t g_bt · (x_bt - mean_bt) · rstd_bt,  dbeta_b = Σ_t g_bt
    RMSNorm:    dgamma_b = Σ_t g_bt · x_bt · rstd_bt                        g, x: (B, T, d); mean, rstd: (B, T)

A program sums ROWS positions of BLOCK features of one sample and writes one float32 row; a second pass adds the rows of
a sample. Both orders are fixed by the shapes, so results are deterministic. No full-size temporary is made.

Accumulation: float32 for half types and float32, whatever mix of dtypes comes in; float64 (always by the fallback) if
any operand is float64. Guarantee: a sample's row depends on that sample's positions alone.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import Backend, jit, launch_on, tl, triton, use_triton

ROWS = 128
"""Positions a program sums: fixed, so that one long sample is many programs and the order of addition never varies."""

CHUNK_BYTES = 64 * 2**20
"""The fallback holds no temporary larger than this."""

_SERVED = (torch.bfloat16, torch.float16, torch.float32)


def bias_sums(g: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Σ_t g: (B, T, p) -> (B, p)."""
    _, dbeta = _sums(g, None, None, None, backend, gamma=False, beta=True)
    return dbeta


def layer_norm_sums(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(dgamma, dbeta), each (B, d), of a LayerNorm whose input was x and whose statistics were mean and rstd."""
    return _sums(g, x, mean, rstd, backend, gamma=True, beta=True)


def rms_norm_sums(g: Tensor, x: Tensor, rstd: Tensor, *, backend: Backend = "auto") -> Tensor:
    """dgamma (B, d) of an RMSNorm whose input was x and whose reciprocal root mean square was rstd."""
    dgamma, _ = _sums(g, x, None, rstd, backend, gamma=True, beta=False)
    return dgamma


def _sums(
    g: Tensor,
    x: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    backend: Backend,
    *,
    gamma: bool,
    beta: bool,
) -> tuple[Tensor, Tensor]:
    """(dgamma, dbeta); the one that is not asked for is an empty tensor."""
    if g.dim() != 3 or (x is not None and x.shape != g.shape):
        raise ValueError(
            f"expected (B, T, features) twice, got {tuple(g.shape)} and {x if x is None else tuple(x.shape)}"
        )
    if any(statistic is not None and statistic.shape != g.shape[:2] for statistic in (mean, rstd)):
        raise ValueError(f"expected statistics of shape {tuple(g.shape[:2])}")
    operands = [tensor for tensor in (g, x, mean, rstd) if tensor is not None]
    served = g.numel() > 0 and all(tensor.dtype in _SERVED for tensor in operands)
    if use_triton(backend, g.device, served=served, why_not="float64 or empty input"):
        return _launch(g, x, mean, rstd, gamma=gamma, beta=beta)
    return _torch(g, x, mean, rstd, gamma=gamma, beta=beta)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _sums_kernel(
    g,
    x,
    mean,
    rstd,
    dgamma,
    dbeta,
    length,
    width,
    g_stride_b,
    g_stride_t,
    x_stride_b,
    x_stride_t,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    GAMMA: tl.constexpr,
    BETA: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Program (b, row block, feature block). dgamma, dbeta: (row blocks, B, width) float32."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    f = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    gamma_sum = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    beta_sum = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    for start in range(0, min(ROWS, length - first), BLOCK_T):
        t = first + start + tl.arange(0, BLOCK_T)
        inside = (t < length)[:, None] & (f < width)[None, :]
        rows = t.to(tl.int64)[:, None]
        g_tile = tl.load(g + b * g_stride_b + rows * g_stride_t + f[None, :], mask=inside, other=0.0).to(tl.float32)
        if BETA:
            beta_sum += g_tile
        if GAMMA:
            x_tile = tl.load(x + b * x_stride_b + rows * x_stride_t + f[None, :], mask=inside, other=0.0)
            x_tile = x_tile.to(tl.float32)
            if CENTRED:
                x_tile -= tl.load(mean + b * length + t, mask=t < length, other=0.0).to(tl.float32)[:, None]
            scale = tl.load(rstd + b * length + t, mask=t < length, other=0.0).to(tl.float32)
            gamma_sum += tl.where(inside, g_tile * x_tile * scale[:, None], 0.0)
    at = (tl.program_id(1) * tl.num_programs(0) + b) * width + f
    if GAMMA:
        tl.store(dgamma + at, tl.sum(gamma_sum, axis=0), mask=f < width)
    if BETA:
        tl.store(dbeta + at, tl.sum(beta_sum, axis=0), mask=f < width)


def _launch(
    g: Tensor, x: Tensor | None, mean: Tensor | None, rstd: Tensor | None, *, gamma: bool, beta: bool
) -> tuple[Tensor, Tensor]:
    batch, length, width = g.shape
    g = g if g.stride(2) == 1 else g.contiguous()
    x = g if x is None else x if x.stride(2) == 1 else x.contiguous()
    rstd = g if rstd is None else rstd.contiguous()
    centred = mean is not None
    mean = rstd if mean is None else mean.contiguous()
    blocks = triton.cdiv(length, ROWS)
    partial = [
        torch.empty(blocks if wanted else 0, batch, width, dtype=torch.float32, device=g.device)
        for wanted in (gamma, beta)
    ]
    block = min(256, triton.next_power_of_2(width))
    with launch_on(g.device):
        _sums_kernel[(batch, blocks, triton.cdiv(width, block))](
            g,
            x,
            mean,
            rstd,
            *partial,
            length,
            width,
            g.stride(0),
            g.stride(1),
            x.stride(0),
            x.stride(1),
            ROWS=ROWS,
            BLOCK_T=8,
            BLOCK=block,
            GAMMA=gamma,
            BETA=beta,
            CENTRED=centred,
            num_warps=4,
        )
    return partial[0].sum(0), partial[1].sum(0)


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(
    g: Tensor, x: Tensor | None, mean: Tensor | None, rstd: Tensor | None, *, gamma: bool, beta: bool
) -> tuple[Tensor, Tensor]:
    operands = [tensor for tensor in (g, x, mean, rstd) if tensor is not None]
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in operands) else torch.float32
    batch, length, width = g.shape
    dgamma = torch.zeros(batch, width, dtype=dtype, device=g.device)
    dbeta = g.sum(dim=1, dtype=dtype) if beta else dgamma
    if gamma:
        assert x is not None and rstd is not None
        rows = max(1, CHUNK_BYTES // max(1, batch * width * dtype.itemsize))
        for start in range(0, length, rows):
            part = (slice(None), slice(start, start + rows))
            normal = x[part].to(dtype)
            if mean is not None:
                normal = normal - mean[part].to(dtype).unsqueeze(-1)
            dgamma += (normal * rstd[part].to(dtype).unsqueeze(-1)).mul_(g[part]).sum(dim=1)
    return dgamma, dbeta

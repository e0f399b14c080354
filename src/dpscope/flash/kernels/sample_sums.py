"""Per-sample gradients of biases and norm layers: sums over positions, each operand read once.

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

from dpscope.flash.kernels.triton_runtime import Backend, jit, launch_on, tl, use_triton
from dpscope.vocabulary.families import CLIPPING
from dpscope.vocabulary.launches import Launch, announce

ROWS = 128
"""Positions a program sums: fixed, so that one long sample is many programs and the order of addition never varies."""

CHUNK_BYTES = 64 * 2**20
"""The fallback holds no temporary larger than this."""

_SERVED = {torch.bfloat16, torch.float16, torch.float32}


def bias_sums(g: Tensor) -> Tensor:
    """Σ_t g: (B, T, p) -> (B, p), by torch: on an H200 its sum takes 24 µs where a kernel took 85 (2026-11-15)."""
    return g.sum(1, dtype=torch.float64 if g.dtype == torch.float64 else torch.float32)


def layer_norm_sums(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(dgamma, dbeta), each (B, d), of a LayerNorm whose input was x and whose statistics were mean and rstd."""
    dgamma, dbeta = _sums(g, x, mean, rstd, backend)
    return dgamma, dbeta


def rms_norm_sums(g: Tensor, x: Tensor, rstd: Tensor, *, backend: Backend = "auto") -> Tensor:
    """dgamma (B, d) of an RMSNorm whose input was x and whose reciprocal root mean square was rstd."""
    return _sums(g, x, None, rstd, backend)[0]


def _sums(g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, backend: Backend) -> tuple[Tensor, ...]:
    """(dgamma, dbeta), or dgamma alone where there is no mean."""
    shape = g.shape
    if len(shape) != 3 or x.shape != shape:
        raise ValueError(f"expected (B, T, features) twice, got {tuple(shape)} and {tuple(x.shape)}")
    lead = shape[:2]
    if rstd.shape != lead or (mean is not None and mean.shape != lead):
        raise ValueError(f"expected statistics of shape {tuple(lead)}")
    dtypes = {g.dtype, x.dtype, rstd.dtype, rstd.dtype if mean is None else mean.dtype}
    if torch.compiler.is_compiling():
        return _traced(g, x, mean, rstd, torch.float64 if torch.float64 in dtypes else torch.float32)
    served = dtypes <= _SERVED and 0 not in shape
    if use_triton(backend, g.device, served=served, why_not="float64 or empty input"):
        return _launch(g, x, mean, rstd)
    return _torch(g, x, mean, rstd, torch.float64 if torch.float64 in dtypes else torch.float32)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _sums_kernel(
    g,
    x,
    mean,
    rstd,
    partials,
    length,
    width,
    g_stride_b,
    g_stride_t,
    x_stride_b,
    x_stride_t,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (b, row block, feature block). partials: (2, or 1 if mean is None; row blocks; B; width) float32."""
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
        x_tile = tl.load(x + b * x_stride_b + rows * x_stride_t + f[None, :], mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            beta_sum += g_tile
            x_tile -= tl.load(mean + b * length + t, mask=t < length, other=0.0).to(tl.float32)[:, None]
        scale = tl.load(rstd + b * length + t, mask=t < length, other=0.0).to(tl.float32)
        gamma_sum += tl.where(inside, g_tile * x_tile * scale[:, None], 0.0)
    at = (tl.program_id(1) * tl.num_programs(0) + b) * width + f
    tl.store(partials + at, tl.sum(gamma_sum, axis=0), mask=f < width)
    if mean is not None:
        at += tl.num_programs(1) * tl.num_programs(0).to(tl.int64) * width
        tl.store(partials + at, tl.sum(beta_sum, axis=0), mask=f < width)


def _launch(g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, ...]:
    batch, length, width = g.shape
    g_strides, x_strides = g.stride(), x.stride()
    if g_strides[2] != 1:
        g = g.contiguous()
        g_strides = g.stride()
    if x_strides[2] != 1:
        x = x.contiguous()
        x_strides = x.stride()
    blocks = -(-length // ROWS)
    block = min(256, 1 << (width - 1).bit_length())
    device = g.device
    wanted = 1 if mean is None else 2
    partials = torch.empty((wanted, blocks, batch, width), dtype=torch.float32, device=device)
    with launch_on(device):
        _sums_kernel[(batch, blocks, -(-width // block))](
            g,
            x,
            None if mean is None else mean.contiguous(),
            rstd.contiguous(),
            partials,
            length,
            width,
            g_strides[0],
            g_strides[1],
            x_strides[0],
            x_strides[1],
            ROWS=ROWS,
            BLOCK_T=8,
            BLOCK=block,
            num_warps=4,
        )
    announce(
        lambda: Launch(
            name=_sums_kernel.__name__,
            family=CLIPPING,
            reads=[g, x, rstd, *([] if mean is None else [mean])],
            writes=[partials],
        )
    )
    return (partials.sum(1) if blocks > 1 else partials.view(wanted, batch, width)).unbind(0)


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    batch, length, width = g.shape
    dgamma = torch.zeros(batch, width, dtype=dtype, device=g.device)
    rows = max(1, CHUNK_BYTES // max(1, batch * width * dtype.itemsize))
    for start in range(0, length, rows):
        part = (slice(None), slice(start, start + rows))
        normal = x[part].to(dtype)
        if mean is not None:
            normal = normal - mean[part].to(dtype).unsqueeze(-1)
        dgamma += (normal * rstd[part].to(dtype).unsqueeze(-1)).mul_(g[part]).sum(dim=1)
    return (dgamma,) if mean is None else (dgamma, g.sum(dim=1, dtype=dtype))


def _traced(g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """In a graph: the compiler makes one pass of it, and holds no temporary."""
    normal = x.to(dtype) if mean is None else x.to(dtype) - mean.to(dtype).unsqueeze(-1)
    dgamma = (normal * rstd.to(dtype).unsqueeze(-1) * g.to(dtype)).sum(1)
    return (dgamma,) if mean is None else (dgamma, g.sum(1, dtype=dtype))

"""Gradients of an RMSNorm, for its input and for each sample's weight, in one pass.

    r_bt = 1/sqrt(mean(x_bt²) + eps),  n_bt = x_bt r_bt,  s_bt = g_bt · w       g, x: (B, T, d); w: (d,)
    dw_b = Σ_t g_bt · n_bt,            dx_bt = r_bt (s_bt - n_bt mean(s_bt · n_bt))

A program takes some positions of one sample, with all of their features at once. It writes their dx, and one float32
row of their part of dw; a second pass adds the rows of a sample up, which may wait for other layers
(`many_bias_sums`). How many positions a program takes follows from the shapes alone, so results are deterministic.

Accumulation: float32 for half types and float32; float64 (always by torch) if an operand is float64.
Guarantee: what a sample gets depends on that sample's positions alone.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dpscope.flash.kernels.sample_sums import added_up
from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES, Backend, jit, launch, tl, use_triton
from dpscope.vocabulary.components import PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import NORMALISATION, Launch, allocates, announce

PROGRAMS = 512
"""Programs of a launch that keep a GPU busy. Small samples are cut into fewer positions each to have as many."""
FEWEST_POSITIONS, MOST_POSITIONS = 8, 128
"""Positions of a program."""
WIDEST = 16384
"""Features that a program holds in registers."""


def rms_norm_gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
    whole: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx in x's dtype, contiguous, and dw (B, d) in float32 at least; None for what is not needed.

    Unless `whole`, dw may be (B, stretches, d), to be added up by `many_bias_sums`.
    """
    shape = x.shape
    if len(shape) != 3 or g.shape != shape or weight.shape != shape[2:]:
        raise ValueError(f"expected (B, T, d) twice and (d,), got {[tuple(each.shape) for each in (g, x, weight)]}")
    served = {g.dtype, x.dtype, weight.dtype} <= TRITON_DTYPES.keys() and 0 not in shape and shape[2] <= WIDEST
    if use_triton(backend, x.device, served=served, why_not=f"float64, empty, or more than {WIDEST} features"):
        return _in_one_launch(g, x, weight, eps, needs_x, needs_weight, whole)
    return by_torch(g, x, weight, eps, needs_x=needs_x, needs_weight=needs_weight)


def by_torch(
    g: Tensor, x: Tensor, weight: Tensor, eps: float, *, needs_x: bool, needs_weight: bool, **_: object
) -> tuple[Tensor | None, Tensor | None]:
    """Return the same in torch's operators, which compiled graphs hold and the compiler fuses."""
    dtype = torch.float64 if torch.float64 in (g.dtype, x.dtype, weight.dtype) else torch.float32
    wide, of_g = x.to(dtype), g.to(dtype)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = wide * rstd
    dw = (of_g * normed).sum(1) if needs_weight else None
    if not needs_x:
        return None, dw
    scaled = of_g * weight.to(dtype)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), dw


@allocates(PER_SAMPLE_GRADIENTS, "aten::empty")
def _in_one_launch(
    g: Tensor, x: Tensor, weight: Tensor, eps: float, needs_x: bool, needs_weight: bool, whole: bool
) -> tuple[Tensor | None, Tensor | None]:
    batch, length, width = x.shape
    g, x = (each if each.stride(2) == 1 else each.contiguous() for each in (g, x))
    rows = MOST_POSITIONS
    while rows > FEWEST_POSITIONS and batch * -(-length // rows) < PROGRAMS:
        rows //= 2
    stretches, block = -(-length // rows), 1 << (width - 1).bit_length()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    parts = torch.empty((stretches, batch, width), dtype=torch.float32, device=x.device) if needs_weight else None
    constants = {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, block // 512)), "num_stages": 3}
    numbers = (length, width, float(eps), *g.stride()[:2], *x.stride()[:2])
    arguments = (g, x, weight.contiguous(), dx, parts, *numbers)
    launch(_rms_norm_kernel, (batch, stretches, 1), arguments, constants, specialised=True)
    writes = [each for each in (dx, parts) if each is not None]
    name = _rms_norm_kernel.__name__
    announce(partial(Launch, name=name, family=NORMALISATION, reads=[g, x, weight], writes=writes))
    return dx, None if parts is None else added_up(parts, whole)


@partial(jit, do_not_specialize=("eps",))
def _rms_norm_kernel(
    g,
    x,
    weight,
    dx,
    parts,
    length,
    width,
    eps,
    g_stride_b,
    g_stride_t,
    x_stride_b,
    x_stride_t,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take ROWS positions of sample b. dx: (B, T, d), or None; parts: (stretches, B, d) float32, or None."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    f = tl.arange(0, BLOCK)
    inside = f < width
    w = tl.load(weight + f, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(first, min(first + ROWS, length)):
        row = tl.full((), t, tl.int64)
        of_g = tl.load(g + b * g_stride_b + row * g_stride_t + f, mask=inside, other=0.0).to(tl.float32)
        of_x = tl.load(x + b * x_stride_b + row * x_stride_t + f, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(of_x * of_x, axis=0) / width + eps)
        normed = of_x * rstd
        total += of_g * normed
        if dx is not None:
            scaled = of_g * w
            along = tl.sum(scaled * normed, axis=0) / width
            answer = (scaled - normed * along) * rstd
            tl.store(dx + (b * length + row) * width + f, answer.to(dx.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + (tl.program_id(1) * tl.num_programs(0) + b) * width + f, total, mask=inside)

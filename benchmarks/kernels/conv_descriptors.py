"""Products of windows that the bulk tensor copy engine loads: some channels, one or three kernel elements."""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dpscope.flash.kernels.conv_products import ConvProduct, squares_of
from dpscope.flash.kernels.scaled_sum import MIN_SCALE
from dpscope.flash.kernels.triton_runtime import dot


@triton.jit
def _place(tile, p, channels, kernel, TAPS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr):
    outs = tl.cdiv(p, BLOCK_O)
    across = tl.cdiv(channels, BLOCK_N)
    return (tile % outs) * BLOCK_O, (tile // outs % across) * BLOCK_N, tile // outs // across * TAPS


@triton.jit
def _start(tap, kernel_w, stride, down, rows, line):
    i = tap // kernel_w * down
    return (((i % stride) * kernel_w + tap % kernel_w) * rows + i // stride) * line


@triton.jit(do_not_specialize=["whole", "line", "rows", "p", "channels", "kernel", "kernel_w", "stride", "down"])
def descriptor_products_kernel(
    x, g, values, parts, whole, line, rows, p, channels, kernel, kernel_w, stride, down,
    TAPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(p, BLOCK_O) * tl.cdiv(channels, BLOCK_N) * (kernel // TAPS)
    b = tl.program_id(0) // tiles
    o, c, tap = _place(tl.program_id(0) % tiles, p, channels, kernel, TAPS, BLOCK_O, BLOCK_N)
    accs = ()
    for _ in tl.static_range(TAPS):
        accs = accs + (tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32),)  # noqa: RUF005
    for first in range(0, whole, BLOCK_K):
        g_tile = g.load([b * p + o, first])
        made = ()
        for j in tl.static_range(TAPS):
            start = _start(tap + j, kernel_w, stride, down, rows, line)
            made = made + (dot(g_tile, x.load([b * channels + c, start + first]).T, accs[j], PRECISION),)  # noqa: RUF005
        accs = made
    d = channels * kernel
    row = o + tl.arange(0, BLOCK_O)
    column = c + tl.arange(0, BLOCK_N)
    inside = (row < p)[:, None] & (column < channels)[None, :]
    total = tl.zeros((), dtype=tl.float64)
    for j in tl.static_range(TAPS):
        acc = tl.where(inside, accs[j], 0.0)
        if values is not None:
            rounded = acc.to(values.dtype.element_ty)
            places = (b.to(tl.int64) * p + row)[:, None] * d + column[None, :] * kernel + (tap + j)
            tl.store(values + places, rounded, mask=inside)
            acc = rounded.to(tl.float32)
        acc, squares, back = squares_of(acc)
        total += tl.sum(squares, axis=0).to(tl.float64) * back * back
    tl.store(parts + tl.program_id(0), total)


@triton.jit(
    do_not_specialize=[
        "batch", "each", "whole", "line", "rows", "p", "channels", "kernel", "kernel_w", "stride", "down",
    ]
)  # fmt: skip
def descriptor_sum_kernel(
    x, g, totals, scale, batch, each, min_scale, whole, line, rows, p, channels, kernel, kernel_w, stride, down,
    TAPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(p, BLOCK_O) * tl.cdiv(channels, BLOCK_N) * kernel
    part = tl.program_id(0) // tiles
    o, c, tap = _place(tl.program_id(0) % tiles, p, channels, kernel, 1, BLOCK_O, BLOCK_N)
    total = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    steps = tl.cdiv(whole, BLOCK_K)
    start = _start(tap, kernel_w, stride, down, rows, line)
    for at in range(part * each * steps, min(batch, part * each + each) * steps):
        b = at // steps
        first = at % steps * BLOCK_K
        g_tile = g.load([b * p + o, first])
        acc = dot(g_tile, x.load([b * channels + c, start + first]).T, acc, PRECISION)
        if first + BLOCK_K >= whole:
            factor = tl.load(scale + b)
            total = tl.where(tl.abs(factor) >= min_scale, total + factor * acc, total)
            acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    d = channels * kernel
    row = o + tl.arange(0, BLOCK_O)
    column = c + tl.arange(0, BLOCK_N)
    places = (part.to(tl.int64) * p + row)[:, None] * d + column[None, :] * kernel + tap
    tl.store(totals + places, total, mask=(row < p)[:, None] & (column < channels)[None, :])


def _operands(product: ConvProduct, tiles):
    images, lines, words, rows, copies, p, _, channels, groups, kernel, kernel_w, stride, down = product.plan.integers
    line = words * product.plan.constants["WORD"]
    if images > 1 or groups > 1 or line * product.x.element_size() % 16:
        raise ValueError("not served")
    x, g = product.x.view(-1, copies * rows * line), product.g.view(-1, lines * line)
    block_o, block_n, block_k = tiles[:3]
    x = TensorDescriptor.from_tensor(x, [block_n, block_k])
    g = TensorDescriptor.from_tensor(g, [block_o, block_k])
    constants = {"PRECISION": product.plan.constants["PRECISION"], "num_warps": tiles[3], "num_stages": tiles[4]}
    constants |= {"BLOCK_O": block_o, "BLOCK_N": block_n, "BLOCK_K": block_k}
    each = -(-p // block_o) * -(-channels // block_n) * kernel
    return x, g, (lines * line, line, rows, p, channels, kernel, kernel_w, stride, down), constants, each


def descriptor_products(product: ConvProduct, dtype, tiles, taps: int = 1):
    x, g, integers, constants, each = _operands(product, tiles)
    plan, new = product.plan, product.g.new_empty
    if math.prod(integers[5:6]) % taps:
        raise ValueError("not served")
    values = None if dtype is None else new((plan.batch, plan.outs, plan.d), dtype=dtype)
    parts = new((plan.batch, each // taps), dtype=torch.float64)
    grid = (plan.batch * each // taps,)
    descriptor_products_kernel[grid](x, g, values, parts, *integers, TAPS=taps, **constants)
    return values, parts


def descriptor_sum(product: ConvProduct, scale, tiles, programs: int = 264):
    x, g, integers, constants, tiles_each = _operands(product, tiles)
    plan = product.plan
    each = -(-plan.batch // max(1, min(plan.batch, programs // tiles_each)))
    parts = -(-plan.batch // each)
    totals = product.g.new_empty((parts, plan.outs, plan.d), dtype=torch.float32)
    descriptor_sum_kernel[(parts * tiles_each,)](
        x, g, totals, scale.float().contiguous(), plan.batch, each, MIN_SCALE, *integers, TAPS=1, **constants
    )
    return totals[0] if parts == 1 else totals.sum(0)

"""Squared norms of per-sample weight gradients of convolutions with few positions, by Gram matrices without patches.

With the windows of conv_products.py, G[t, s] = Σ_o g[o, t] g[o, s] and K[a, b] = Σ_c x[c, a] x[c, b],

    ‖V_b‖² = Σ_{t,s} G[t, s] Σ_taps K[t·stride + tap, s·stride + tap],

where places in the padding count zero. K is made once for all kernel elements: with P positions and C channels that is
P²·C products in place of P·C·O·kernel. Both matrices are symmetric, so only tiles on and below the diagonal are made.

    _input_gram_kernel    K of one sample, a tile a program
    _conv_gram_kernel     a tile of G, in registers, times its shifted sum of K
    _conv_finish_kernel   adds up the tiles of a sample; where they cancel, the products themselves

Guarantee: operands are rounded as in `conv_sum` (the tensor cores drop the same bits), and norms are of those. The Gram
sum errs relative to S², S = Σ_t √(G[t, t] Σ_taps K[tap, tap]). Where the square is below FLOOR · S², or leaves the
range of float32, `_conv_finish_kernel` makes the sample's products and squares them: no norm is too small. A sample's
result depends on that sample alone.

Served: one image a sample, one group, and up to MOST_POSITIONS in x and in g.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from dpscope.flash.kernels.conv_products import Geometry, launch, squares_of
from dpscope.flash.kernels.gram_kernels import NEGLIGIBLE, SMALL, UNDERFLOW
from dpscope.flash.kernels.triton_runtime import constant, dot, jit, tl
from dpscope.vocabulary.phases import CLIPPING, Launch, announce

MOST_POSITIONS = 256
FLOOR = 2.0**-11
"""The least share of S² at which a Gram sum is exact enough: its error is about 1e-8·S²."""

BLOCK_T, BLOCK_K = 64, 32
_TILES = {"BLOCK_T": BLOCK_T, "BLOCK_K": BLOCK_K}
_LAUNCH = {"num_warps": 4, "num_stages": 3}
_SMALL, _UNDERFLOW, _NEGLIGIBLE, _FLOOR = map(constant, (SMALL, UNDERFLOW, NEGLIGIBLE, FLOOR))


def serves_gram(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
    """Return True if the kernels take this convolution, which `serves_conv` serves."""
    n = len(geometry.kernel)
    positions = max(math.prod(x.shape[-n:]), math.prod(g.shape[-n:]))
    return geometry.groups == 1 and g.dim() == n + 2 and positions <= MOST_POSITIONS


def conv_gram_norms(x: Tensor, g: Tensor, at: Geometry, *, in_tf32: bool) -> Tensor:
    """Return ‖V_b‖² of each sample, (B,) float64. x: (B, C, *), g: (B, O, *out)."""
    n, x, g = len(at.kernel), x.contiguous(), g.contiguous()
    batch, channels, outs = len(x), x.shape[1], g.shape[1]
    height, width = x.shape[-2:] if n == 2 else (1, x.shape[-1])
    found, length = height * width, math.prod(g.shape[-n:])
    precision = {"PRECISION": "tf32" if in_tf32 or g.dtype != torch.float32 else "tf32x3"}
    grams = x.new_empty((batch, found, found), dtype=torch.float32)
    blocks = -(-found // BLOCK_T)
    tiles = blocks * (blocks + 1) // 2
    word = math.gcd(found, 8)
    launch(_input_gram_kernel, batch * tiles, (x, grams), (tiles, found // word, channels),
           {"WORD": word, **precision, **_TILES, **_LAUNCH})  # fmt: skip
    blocks = -(-length // BLOCK_T)
    tiles = blocks * (blocks + 1) // 2
    # A line is an image of one row.
    pairs = ((at.kernel, 1), (at.stride, 1), (at.padding, 0), (at.dilation, 1))
    options = [value for of, alone in pairs for value in (of[0] if n == 2 else alone, of[-1])]
    shape = (height, width, g.shape[-1], *options)
    sums = x.new_empty((batch, tiles, 3), dtype=torch.float64)
    word = math.gcd(length, 8)
    launch(_conv_gram_kernel, batch * tiles, (g, grams, sums), (tiles, length // word, outs, channels, *shape),
           {"WORD": word, **precision, **_TILES, **_LAUNCH})  # fmt: skip
    columns = -(-channels * math.prod(at.kernel) // BLOCK_T)
    parts = x.new_empty((batch, columns), dtype=torch.float64)
    launch(_conv_finish_kernel, batch * columns, (x, g, sums, parts), (tiles, columns, length, outs, channels, *shape),
           {**precision, **_TILES, **_LAUNCH})  # fmt: skip
    flops = 2 * batch * (found**2 * channels + length**2 * outs) // 2
    announce(
        lambda: Launch(name=_conv_gram_kernel.__name__, family=CLIPPING, reads=[x, g], writes=[parts], flops=flops)
    )
    return parts.sum(1)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def _below_diagonal(tile):
    """Return row and column of the tile with this number, counted along rows on and below the diagonal."""
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    return row, tile - row * (row + 1) // 2


@jit
def _gram(
    rows, t, s, length, channels, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return Σ_c rows[c, t] rows[c, s], (BLOCK_T, BLOCK_T) float32. rows: (channels, length) of one sample."""
    acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for first in range(0, channels, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        there = (c < channels)[:, None]
        left = tl.load(rows + c[:, None] * length + t[None, :], mask=there & (t < length)[None, :], other=0.0)
        right = tl.load(rows + c[:, None] * length + s[None, :], mask=there & (s < length)[None, :], other=0.0)
        acc = dot(tl.trans(left), right, acc, PRECISION)
    return acc


_SHAPE = (
    "height", "width", "width_out", "kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w", "down", "along",
)  # fmt: skip


@partial(jit, do_not_specialize=("tiles", "words", "channels"))
def _input_gram_kernel(
    x, grams, tiles, words, channels,
    WORD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write one tile of K of one sample. grams: (B, P, P), of which the upper tiles stay unwritten."""
    b = (tl.program_id(0) // tiles).to(tl.int64)
    length = words * WORD
    row, column = _below_diagonal(tl.program_id(0) % tiles)
    t = row * BLOCK_T + tl.arange(0, BLOCK_T)
    s = column * BLOCK_T + tl.arange(0, BLOCK_T)
    acc = _gram(x + b * channels * length, t, s, length, channels, PRECISION, BLOCK_T, BLOCK_K)
    places = grams + b * length * length + t[:, None] * length + s[None, :]
    tl.store(places, acc, mask=(t < length)[:, None] & (s < length)[None, :])


@jit
def _seen(t, i, j, height, width, width_out, stride_h, stride_w, pad_h, pad_w, down, along):
    """Return the places of x that kernel element (i, j) sees at positions t, and whether they are inside."""
    y = (t // width_out) * stride_h + i * down - pad_h
    column = (t % width_out) * stride_w + j * along - pad_w
    return y * width + column, (y >= 0) & (y < height) & (column >= 0) & (column < width)


@partial(jit, do_not_specialize=("tiles", "words", "outs", "channels", *_SHAPE))
def _conv_gram_kernel(
    g, grams, sums, tiles, words, outs, channels,
    height, width, width_out, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, down, along,
    WORD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store the sum of one tile of one sample, its S and what may be lost of S. sums: (B, tiles, 3)."""
    b = (tl.program_id(0) // tiles).to(tl.int64)
    length = words * WORD
    row, column = _below_diagonal(tl.program_id(0) % tiles)
    t = row * BLOCK_T + tl.arange(0, BLOCK_T)
    s = column * BLOCK_T + tl.arange(0, BLOCK_T)
    g_gram = _gram(g + b * outs * length, t, s, length, outs, PRECISION, BLOCK_T, BLOCK_K)
    x_gram = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    found = height * width
    own = grams + b * found * found
    for tap in range(kernel_h * kernel_w):
        i = tap // kernel_w
        j = tap % kernel_w
        a, a_in = _seen(t, i, j, height, width, width_out, stride_h, stride_w, pad_h, pad_w, down, along)
        e, e_in = _seen(s, i, j, height, width, width_out, stride_h, stride_w, pad_h, pad_w, down, along)
        high = tl.maximum(a[:, None], e[None, :])
        low = tl.minimum(a[:, None], e[None, :])
        inside = (a_in & (t < length))[:, None] & (e_in & (s < length))[None, :]
        x_gram += tl.load(own + high * found + low, mask=inside, other=0.0)
    products = x_gram.to(tl.float64) * g_gram.to(tl.float64)  # of four operands: float32's range is too small
    weight = tl.where(row == column, 1.0, 2.0)  # a tile on the diagonal holds both halves
    diagonal = t[:, None] == s[None, :]
    x_own = tl.sum(tl.where(diagonal, x_gram, 0.0), axis=1)
    g_own = tl.sum(tl.where(diagonal, g_gram, 0.0), axis=1)
    at_risk = (t < length) & (row == column) & ((x_own < _SMALL) | (g_own < _SMALL))
    x_most = tl.sqrt(x_own + channels * kernel_h * kernel_w * _UNDERFLOW)
    most = x_most.to(tl.float64) * tl.sqrt(g_own + outs * _UNDERFLOW).to(tl.float64)
    slot = sums + tl.program_id(0).to(tl.int64) * 3
    tl.store(slot, tl.sum(tl.sum(products, axis=1), axis=0) * weight)
    tl.store(slot + 1, tl.sum(tl.sqrt(x_own).to(tl.float64) * tl.sqrt(g_own).to(tl.float64), axis=0))
    tl.store(slot + 2, tl.sum(tl.where(at_risk, most, 0.0), axis=0))


@partial(jit, do_not_specialize=("tiles", "columns", "length", "outs", "channels", *_SHAPE))
def _conv_finish_kernel(
    x, g, sums, parts, tiles, columns, length, outs, channels,
    height, width, width_out, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, down, along,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store a sample's square in its first part, or, where the Gram sum is not exact enough, that of some columns."""
    b = (tl.program_id(0) // columns).to(tl.int64)
    square = tl.zeros((), dtype=tl.float64)
    length_sum = tl.zeros((), dtype=tl.float64)
    lost = tl.zeros((), dtype=tl.float64)
    for tile in range(tiles):
        slot = sums + (b * tiles + tile) * 3
        square += tl.load(slot)
        length_sum += tl.load(slot + 1)
        lost += tl.load(slot + 2)
    finite = (tl.abs(square) < float("inf")) & (length_sum < float("inf"))
    good = finite & (square >= length_sum * length_sum * _FLOOR) & (lost * lost <= square * _NEGLIGIBLE)
    part = tl.program_id(0) % columns
    if good:
        square = tl.where(part == 0, square, 0.0)
    else:
        square = tl.zeros((), dtype=tl.float64)
        kernel = kernel_h * kernel_w
        n = part * BLOCK_T + tl.arange(0, BLOCK_T)
        n_in = n < channels * kernel
        i = (n % kernel) // kernel_w
        j = n % kernel_w
        windows = x + (b * channels + n // kernel) * height * width
        for first_out in range(0, outs, BLOCK_T):
            o = first_out + tl.arange(0, BLOCK_T)
            acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
            for first in range(0, length, BLOCK_K):
                t = first + tl.arange(0, BLOCK_K)
                places, inside = _seen(
                    t[:, None], i[None, :], j[None, :],
                    height, width, width_out, stride_h, stride_w, pad_h, pad_w, down, along,
                )  # fmt: skip
                inside = inside & (t < length)[:, None] & n_in[None, :]
                x_tile = tl.load(windows[None, :] + places, mask=inside, other=0.0)
                g_in = (o < outs)[:, None] & (t < length)[None, :]
                g_tile = tl.load(g + (b * outs + o[:, None]) * length + t[None, :], mask=g_in, other=0.0)
                acc = dot(g_tile, x_tile, acc, PRECISION)
            _, squares, back = squares_of(acc)
            square += tl.sum(squares, axis=0).to(tl.float64) * back * back
    tl.store(parts + tl.program_id(0), square)

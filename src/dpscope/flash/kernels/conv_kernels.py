"""Triton kernels of conv_products.py: per-sample products of convolutions, stored, measured or summed; copies of x.

The arguments of a product: g: (B, images, groups·p, lines, line), x: copies of x, (B, images, groups·channels, copies,
rows, line); a line has `words` words of WORD elements. Columns d are channels and places of the window; a copy holds
x for one column of the window and one phase of the stride in y, of which every `stride`-th row is met.

A launch makes the products of `members` convolutions of equal shapes, one after the other. Their x, and their g, lie
in one tensor, or the argument is a table of their pointers, which are multiples of 16. Results lie in one tensor.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import partial

from dpscope.flash.kernels.tensor_lists import pointer_at
from dpscope.flash.kernels.triton_runtime import constant, dot, jit, tl

_LARGE, _SMALL = constant(2.0**50), constant(2.0**-40)
_SHRINK, _GROW = constant(2.0**-75), constant(2.0**100)


@jit
def _of_member(operand, member, size, DTYPE: tl.constexpr):
    """Return where a convolution's x or g begins, each of `size` elements."""
    if operand.dtype.element_ty == tl.int64:
        own = pointer_at(operand + member, DTYPE, True)
    else:
        own = operand + member.to(tl.int64) * size
    return own


_COPY_INTEGERS = (
    "images", "blocks", "channels", "height", "width", "rows", "words", "width_out", "stride", "step", "top", "left",
    "tap",
)  # fmt: skip


@partial(jit, do_not_specialize=_COPY_INTEGERS)
def _shifted_copy_kernel(
    x, made, images, blocks, channels, height, width, rows, words, width_out, stride, step, top, left, tap,
    DTYPE: tl.constexpr, PHASES: tl.constexpr, KERNEL_W: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write some words of an image to all copies. x: (images, C, H, W), made: (members, images, C, copies, rows, line).

    A thread writes a word of WORD elements at once, and finds its place once for all of them.
    """
    image = (tl.program_id(0) // blocks).to(tl.int64)
    x = _of_member(x, image // images, images.to(tl.int64) * channels * height * width, DTYPE)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    channel = at // (rows * words)
    place = at % (rows * words)
    area = rows * words * WORD
    y = (place // words) * stride - top
    along = tl.arange(0, WORD)[None, :]
    column = ((place % words) * WORD)[:, None] + along
    here = channel < channels
    source = x + (((image % images) * channels + channel) * height * width)[:, None]
    target = made + ((image * channels + channel) * (PHASES * KERNEL_W) * area + place * WORD)[:, None] + along
    for phase in tl.static_range(PHASES):
        row = y + phase
        inside = (here & (row >= 0) & (row < height))[:, None] & (column < width_out)
        for j in tl.static_range(KERNEL_W):
            left_of = column * step + j * tap - left
            found = inside & (left_of >= 0) & (left_of < width)
            value = tl.load(source + (row * width)[:, None] + left_of, mask=found, other=0.0)
            tl.store(target + (phase * KERNEL_W + j) * area, value, mask=here[:, None])


@jit
def _place(
    tile, p, d, kernel, kernel_w, stride, down, copies, rows, line, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return rows and columns of a tile, and where a column's window begins in a group's channels."""
    columns = tl.cdiv(d, BLOCK_N)
    o = (tile // columns) * BLOCK_O + tl.arange(0, BLOCK_O)
    n = (tile % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = (n % kernel) // kernel_w * down
    copy = (n // kernel) * copies + (i % stride) * kernel_w + n % kernel_w
    return o, n, (copy * rows + i // stride) * line


@jit
def _multiply(x, g, window, o, first, o_in, n_in, whole, acc, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return acc + g·windows over the positions from `first` on. x, g: of one image's group."""
    t = first + tl.arange(0, BLOCK_K)
    g_tile = tl.load(g + (o[:, None] * whole + t[None, :]), mask=o_in[:, None] & (t < whole)[None, :], other=0.0)
    x_tile = tl.load(x + (window[None, :] + t[:, None]), mask=(t < whole)[:, None] & n_in[None, :], other=0.0)
    return dot(g_tile, x_tile, acc, PRECISION)


@jit
def squares_of(acc):
    """Return a tile, scaled by a power of two if its squares need it, the squares of its rows, and 1 / scale."""
    largest = tl.max(tl.max(tl.abs(acc), axis=1), axis=0)
    factor = tl.where(largest > _LARGE, _SHRINK, tl.where(largest < _SMALL, _GROW, 1.0))
    acc = acc * factor
    return acc, tl.sum(acc * acc, axis=1), 1.0 / factor.to(tl.float64)


_INTEGERS = (
    "members", "images", "lines", "words", "rows", "copies", "p", "d", "channels", "groups", "kernel", "kernel_w",
    "stride", "down",
)  # fmt: skip


@jit
def _measured(acc, direction, parts, at, tile, columns, outs, row, o_in):
    """Store a tile's squares at a place, or of each row of a sample squares, sum and product with its direction."""
    acc, squares, back = squares_of(acc)
    if direction is None:
        tl.store(parts + at, tl.sum(squares, axis=0).to(tl.float64) * back * back)
    else:
        slots = parts + (at * columns + tile % columns) * 3 * outs + row
        tl.store(slots, squares.to(tl.float64) * back * back, mask=o_in)
        tl.store(slots + outs, tl.sum(acc, axis=1).to(tl.float64) * back, mask=o_in)
        tl.store(slots + 2 * outs, tl.sum(acc * direction, axis=1).to(tl.float64) * back, mask=o_in)


@partial(jit, do_not_specialize=(*_INTEGERS, "batch", "each"))
def _conv_norms_kernel(
    x, g, parts, directions, batch, each,
    members, images, lines, words, rows, copies, p, d, channels, groups, kernel, kernel_w, stride, down,
    DTYPE: tl.constexpr, WORD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Measure one tile of `each` samples' group per program, one after the other."""
    columns = tl.cdiv(d, BLOCK_N)
    tiles = tl.cdiv(p, BLOCK_O) * columns
    programs = tl.num_programs(0) // members
    member, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    tile = program % tiles
    group = program // tiles % groups
    first_sample = program // tiles // groups * each
    line = words * WORD
    whole = lines * line
    of_images = (batch * images).to(tl.int64) * groups
    x = _of_member(x, member, of_images * channels * copies * rows * line, DTYPE)
    g = _of_member(g, member, of_images * p * whole, DTYPE)
    o, n, window = _place(tile, p, d, kernel, kernel_w, stride, down, copies, rows, line, BLOCK_O, BLOCK_N)
    o_in, n_in = o < p, n < d
    row, outs = group * p + o, groups * p
    direction = None
    if directions is not None:
        inside = o_in[:, None] & n_in[None, :]
        direction = tl.load(directions + row.to(tl.int64)[:, None] * d + n[None, :], mask=inside, other=0.0)
    steps = tl.cdiv(whole, BLOCK_K)
    acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    # One loop over all samples: a loop for each would drain and refill the pipeline between them.
    for at in range(first_sample * images * steps, min(batch, first_sample + each) * images * steps):
        image = (at // steps).to(tl.int64)
        k = at % steps
        own_x = x + (image * groups + group) * channels * copies * rows * line
        own_g = g + (image * groups + group) * p * whole
        acc = _multiply(own_x, own_g, window, o, k * BLOCK_K, o_in, n_in, whole, acc, PRECISION, BLOCK_K)
        if (k == steps - 1) & ((image + 1) % images == 0):
            b = member * batch + image // images
            slot = (b * groups + group) * tiles + tile if directions is None else b
            _measured(acc, direction, parts, slot, tile, columns, outs, row, o_in)
            acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)


@partial(jit, do_not_specialize=_INTEGERS)
def _conv_products_kernel(
    x, g, values, parts, directions,
    members, images, lines, words, rows, copies, p, d, channels, groups, kernel, kernel_w, stride, down,
    DTYPE: tl.constexpr, WORD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one sample's group per program."""
    columns = tl.cdiv(d, BLOCK_N)
    tiles = tl.cdiv(p, BLOCK_O) * columns
    tile = tl.program_id(0) % tiles
    b = (tl.program_id(0) // tiles // groups).to(tl.int64)  # of all members
    group = tl.program_id(0) // tiles % groups
    line = words * WORD
    whole = lines * line
    batch = tl.num_programs(0) // tiles // groups // members
    of_images = (batch * images).to(tl.int64) * groups
    x = _of_member(x, b // batch, of_images * channels * copies * rows * line, DTYPE)
    g = _of_member(g, b // batch, of_images * p * whole, DTYPE)
    o, n, window = _place(tile, p, d, kernel, kernel_w, stride, down, copies, rows, line, BLOCK_O, BLOCK_N)
    o_in, n_in = o < p, n < d
    row = group * p + o
    acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    for image in range(images):
        at = (b % batch) * images + image
        own_x = x + (at * groups + group) * channels * copies * rows * line
        own_g = g + (at * groups + group) * p * whole
        for first in range(0, whole, BLOCK_K):
            acc = _multiply(own_x, own_g, window, o, first, o_in, n_in, whole, acc, PRECISION, BLOCK_K)
    inside = o_in[:, None] & n_in[None, :]
    if values is not None:
        rounded = acc.to(values.dtype.element_ty)
        places = (b * groups * p + row)[:, None] * d + n[None, :]
        tl.store(values + places, rounded, mask=inside)
        acc = rounded.to(tl.float32)
    direction = None
    if directions is not None:
        direction = tl.load(directions + row.to(tl.int64)[:, None] * d + n[None, :], mask=inside, other=0.0)
    slot = tl.program_id(0) if directions is None else b
    _measured(acc, direction, parts, slot, tile, columns, groups * p, row, o_in)


@partial(jit, do_not_specialize=(*_INTEGERS, "batch", "each"))
def _conv_sum_kernel(
    x, g, totals, scale, batch, each, min_scale,
    members, images, lines, words, rows, copies, p, d, channels, groups, kernel, kernel_w, stride, down,
    DTYPE: tl.constexpr, WORD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum one tile over `each` samples per program. totals: (members, parts, groups·p, d)."""
    tiles = tl.cdiv(p, BLOCK_O) * tl.cdiv(d, BLOCK_N)
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles % groups
    part = tl.program_id(0) // tiles // groups  # of all members
    parts = tl.num_programs(0) // tiles // groups // members
    line = words * WORD
    whole = lines * line
    of_images = (batch * images).to(tl.int64) * groups
    x = _of_member(x, part // parts, of_images * channels * copies * rows * line, DTYPE)
    g = _of_member(g, part // parts, of_images * p * whole, DTYPE)
    o, n, window = _place(tile, p, d, kernel, kernel_w, stride, down, copies, rows, line, BLOCK_O, BLOCK_N)
    o_in, n_in = o < p, n < d
    row = group * p + o
    total = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    steps = tl.cdiv(whole, BLOCK_K)
    first_sample = (part % parts) * each
    # One loop over all samples: a loop for each would drain and refill the pipeline between them.
    for at in range(first_sample * images * steps, min(batch, first_sample + each) * images * steps):
        image = (at // steps).to(tl.int64)
        k = at % steps
        own_x = x + (image * groups + group) * channels * copies * rows * line
        own_g = g + (image * groups + group) * p * whole
        acc = _multiply(own_x, own_g, window, o, k * BLOCK_K, o_in, n_in, whole, acc, PRECISION, BLOCK_K)
        if (k == steps - 1) & ((image + 1) % images == 0):
            factor = tl.load(scale + image // images).to(tl.float32)
            # A sample without a factor may hold NaN: it is put aside, not multiplied by zero.
            total = tl.where(tl.abs(factor) >= min_scale, total + factor * acc, total)
            acc = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    places = totals + (part.to(tl.int64) * groups * p + row)[:, None] * d + n[None, :]
    tl.store(places, total, mask=o_in[:, None] & n_in[None, :])

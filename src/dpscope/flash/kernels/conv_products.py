"""Per-sample weight gradients of convolutions, their norms and their clipped sums, without unfolded patches.

With x: (B, k, C, H, W) padded, k images a sample, and g: (B, k, O, OH, OW),

    V_b[o, c, i, j] = Σ_{image, y, x} g[b, image, o, y, x] · X[b, image, c, y·s + i·d, x·s + j·d]

is a product of g (O × positions) and windows of x (positions × C·kernel) that is loaded window by window: no patch is
ever written. Three kernels share that product:

    _conv_products_kernel   V_b of one sample a program: stored with its squares, or squared and dropped
    _conv_norms_kernel      squares of some samples' V_b in turn, of short samples and where directions are measured
    _conv_sum_kernel        Σ_b c_b V_b: the factor multiplies a sample's whole tile, in float32

Guarantee: norms are of the values that are stored, after their rounding, or of products that `_conv_sum_kernel` makes
again in the same way: operands are rounded alike (TF32, where cuDNN may use it for the convolution itself), and no
factor is rounded into an operand. A sample's positions are never divided among programs. A sample whose factor is zero
or NaN has no share.

Every finite value has its square: a tile is scaled by a power of two before it is squared, if it needs to be, and tiles
are added up in float64.

Windows are contiguous: x is copied once for each column of the kernel and each phase of the stride in y. The copy for
column j and phase f holds X[c, y·s + f, x·s + j·d] at (y, x), its rows as long as those of g, so that the window under
kernel element (i, j) is a copy from row (i·d) // s on. Positions lie side by side in memory (NCHW) and rows are whole
words, so that a thread copies 16 bytes; g is copied too if its rows are not. Kernels of one element read x itself.
Copies are made of some samples at a time. Convolutions of equal shapes share launches for norms and for sums, as far as
their copies and sums take no more than `LEAST_COPIES`; pointers of all of them travel in one table.

Tiles depend on shapes alone: a search at run time would make the first step slower and results depend on the machine's
load.

Served: bfloat16, float16 and float32, one or two spatial dimensions. For anything else callers use another path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_zeros  # torch's own, whatever F.pad becomes

from dpscope.flash.kernels.conv_kernels import (
    _conv_norms_kernel,
    _conv_products_kernel,
    _conv_sum_kernel,
    _shifted_copy_kernel,
)
from dpscope.flash.kernels.scaled_sum import MIN_SCALE
from dpscope.flash.kernels.tensor_lists import alike
from dpscope.flash.kernels.triton_runtime import (
    TRITON_DTYPES,
    Backend,
    launch,
    stages_that_fit,
    table_on,
    use_triton,
)
from dpscope.vocabulary.components import GRADIENTS, PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import COPY, GEMM, Launch, allocates, announce

LONG_IMAGES = 512
"""Positions from which kernels of one element take long steps."""

FEW_POSITIONS = 128
"""Positions up to which a program takes a sample's norm in so few steps that it goes on with other samples."""

LEAST_COPIES = 2**26
"""Bytes of copies below which a launch costs more than they do."""
FEWEST_PROGRAMS = 160
"""Programs of a launch that an H200 runs in the time of one, or nearly."""

_COPY_BLOCK = 1024  # elements a program writes to each copy

_PROCESSORS = 132  # of an H200: sums are made of parts of the batch that fill them once, or else twice
_ALL = slice(None)
_TURNS = 4224  # warps of programs that take turns on an H200: each makes several samples, one after the other


class Geometry(NamedTuple):
    """Per spatial dimension, except `groups`. `padding` is of zeros, the same on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def copies(self) -> bool:
        """True if patches are something else than x itself."""
        return any(size > 1 for size in (*self.kernel, *self.stride)) or any(self.padding)

    def padded(self, x: Tensor) -> Tensor:
        return pad_zeros(x, [side for pad in reversed(self.padding) for side in (pad, pad)]) if any(self.padding) else x

    def unfold(self, x: Tensor, out: tuple[int, ...]) -> Tensor:
        """Return the windows under the `out` positions of x: (b, C, *) -> (b·groups, C/groups · Π kernel, L)."""
        x = self.padded(x)
        batch, channels, spatial = x.shape[0], x.shape[1] // self.groups, x.stride()[2:]
        size = (batch, self.groups, channels, *out, *self.kernel)
        steps = [stride * step for stride, step in zip(spatial, self.stride, strict=True)]
        taps = [stride * step for stride, step in zip(spatial, self.dilation, strict=True)]
        windows = x.as_strided(size, (x.stride(0), x.stride(1) * channels, x.stride(1), *steps, *taps))
        n, width, length = len(out), channels * math.prod(self.kernel), math.prod(out)
        windows = windows.permute(0, 1, 2, *range(3 + n, 3 + 2 * n), *range(3, 3 + n))
        return windows.reshape(batch * self.groups, width, length)


class ConvTiles(NamedTuple):
    """Rows (output channels), columns (input channels and kernel) and positions of a step."""

    block_o: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FOR_NORMS, FOR_DIRECTIONS, FOR_VALUES, FOR_SUM = "norms", "directions", "kept", "sum"
"""What is made of the products: norms alone, norms and products with directions, values besides, or a sum."""


def default_tiles(p: int, d: int, length: int, work: str, *, pointwise: bool) -> ConvTiles:
    """Return the tile for p rows, d columns and `length` positions: the fastest on an H200, or near it (2026-11-18).

    Large tiles load least for a product, but kept values have to be written from them, and a sum holds two of them.
    """
    block_o, block_n = _block(p), _block(d)
    if work == FOR_NORMS and p >= 128 and d >= 256:
        return ConvTiles(128, 256, 32, 8, 3)
    # A tile of directions takes as many registers as one of products.
    if work == FOR_DIRECTIONS or (not pointwise and block_o == 64 and d >= 256):
        return ConvTiles(min(64, block_o), 128 if d >= 256 else block_n, 32, 4, 3)
    if pointwise and length >= LONG_IMAGES:
        wide = block_o == block_n == 128
        return (
            ConvTiles(block_o, block_n, 64, 8, 3) if wide else ConvTiles(min(64, block_o), min(64, block_n), 64, 4, 4)
        )
    if pointwise or block_o < 128:
        return ConvTiles(block_o, min(64, block_n), 32, 4, 3)
    if work == FOR_SUM and block_n == 128:
        return ConvTiles(128, 128, 64, 8, 3)
    return ConvTiles(block_o, block_n, 32, 8 if block_n == 128 else 4, 3)


def _block(size: int) -> int:
    """Return a power of two from 16 to 128: large blocks load less for a product, small ones waste less of it."""
    return min((128, 64, 32, 16), key=lambda block: -(-size // block) * (block + 32))


class _Plan(NamedTuple):
    """Sizes of a product and the arguments that both kernels take."""

    work: str
    batch: int
    outs: int
    d: int
    tiles: int  # of one sample
    columns: int  # of tiles
    missing: int  # positions of a line up to a whole word
    copies: int  # of x: kernel columns and phases of the stride
    rows: int  # of a copy
    copied: int  # bytes of all copies; 0 for a kernel of one element, which needs none
    picks: bool  # whether such a kernel leaves out places of x, or adds some
    held: int  # bytes of what is copied or padded
    turns: int  # programs that make several samples, one after the other; 0: each makes one
    flops: int
    integers: tuple[int, ...]
    constants: Mapping[str, Any]
    copying: Mapping[str, Any]  # constants of the kernel that makes the copies

    @property
    def sum_programs(self) -> int:
        """Programs of a sum. Each part of the batch has its own sum, so that few parts have less to write."""
        once = _PROCESSORS // self.tiles * self.tiles
        alone = self.constants["num_warps"] == 8  # on a processor
        return _PROCESSORS if alone and once >= 0.95 * _PROCESSORS else 2 * _PROCESSORS

    def shared_out(self, programs: int) -> tuple[int, int]:
        """Return the samples of each share of the batch, and how many shares give at most so many programs."""
        each = -(-self.batch // max(1, min(self.batch, programs // self.tiles)))
        return each, -(-self.batch // each)


@lru_cache(maxsize=1024)  # asked by every layer in every step
def _plan(
    x: tuple[int, ...],
    g: tuple[int, ...],
    at: Geometry,
    dtype: torch.dtype,
    in_tf32: bool,
    work: str,
    tiles: ConvTiles | None,
    device: torch.device,
) -> _Plan:
    n, kernel = len(at.kernel), math.prod(at.kernel)
    channels, p, batch = x[-n - 1] // at.groups, g[-n - 1] // at.groups, g[0]
    d, length, images = channels * kernel, math.prod(g[-n:]), g[1] if len(g) > n + 2 else 1
    # A kernel of one element meets each position once: an image is one line.
    line = length if kernel == 1 else g[-1]
    missing = -line % 8 if line % (4 if dtype == torch.float32 else 2) else 0
    word = math.gcd(line + missing, 8)
    steep = n == 2 and at.kernel[0] > 1
    stride, down = (at.stride[0], at.dilation[0]) if steep else (1, 1)
    copies, lines = stride * at.kernel[-1], length // line
    rows = lines + (at.kernel[0] - 1) * down // stride if steep else lines
    tiles = tiles or default_tiles(p, d, length, work, pointwise=kernel == 1)
    columns = -(-d // tiles.block_n)
    each = at.groups * -(-p // tiles.block_o) * columns
    integers = [images, lines, (line + missing) // word, rows, copies, p, d, channels]
    integers += [at.groups, kernel, at.kernel[-1], stride, down]
    precision = "tf32" if in_tf32 or dtype != torch.float32 else "tf32x3"
    constants: dict[str, Any] = {"DTYPE": TRITON_DTYPES[dtype], "WORD": word, "PRECISION": precision}
    for name, value in zip(("BLOCK_O", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), tiles, strict=True):
        constants[name] = value
    step = (tiles.block_o + tiles.block_n) * tiles.block_k * dtype.itemsize
    constants["num_stages"] = stages_that_fit(tiles.num_stages, step, device)
    flops = 2 * batch * images * length * at.groups * p * d
    planes = math.prod(x[1:-n])  # channels of all images of a sample
    copied = batch * planes * copies * rows * (g[-1] + missing) * dtype.itemsize if kernel > 1 else 0
    in_turns = work == FOR_DIRECTIONS or (work == FOR_NORMS and images * length <= FEW_POSITIONS)
    turns = _TURNS // tiles.num_warps if in_turns else 0
    held = copied or (math.prod(x) + math.prod(g)) * dtype.itemsize * (missing > 0 or at.copies)
    sizes = batch, at.groups * p, d, each, columns, missing, copies, rows, copied, at.copies, held, turns
    copying = {"DTYPE": TRITON_DTYPES[dtype], "PHASES": copies // at.kernel[-1], "KERNEL_W": at.kernel[-1]}
    copying |= {"WORD": word, "BLOCK": _COPY_BLOCK // word, "num_warps": 4, "num_stages": 1}
    return _Plan(work, *sizes, flops, tuple(integers), constants, copying)


class ConvProduct(NamedTuple):
    """The operands of one convolution.

    x: (B, C, *) or (B, k, C, *), g: (B, O, *out) or (B, k, O, *out), n spatial dimensions each. in_tf32: float32
    operands are read as TF32; otherwise they are split in three products of TF32, which are as near as float32's.
    """

    x: Tensor
    g: Tensor
    geometry: Geometry
    in_tf32: bool
    tiles: ConvTiles | None = None

    def plan(self, work: str) -> _Plan:
        x, g = self.x, self.g
        return _plan(x.shape, g.shape, self.geometry, g.dtype, self.in_tf32, work, self.tiles, g.device)

    def pieces(self, plan: _Plan) -> Iterator[tuple[slice, ConvProduct]]:
        """Yield some samples after the other: copies take no more than x, whose gradient comes next.

        Fewer programs than a GPU has processors would take as long as all of them.
        """
        batch, count = plan.batch, 1
        if plan.copied > LEAST_COPIES:
            wanted = -(-plan.copied // max(LEAST_COPIES, self.x.nbytes))
            count = max(1, min(wanted, batch * plan.tiles // FEWEST_PROGRAMS))
        if count == 1:  # as most are: a slice takes the host as long as a launch
            yield _ALL, self
            return
        step = -(-batch // count)
        for start in range(0, batch, step):
            samples = slice(start, min(batch, start + step))
            yield samples, self._replace(x=self.x[samples], g=self.g[samples])


class _Group(NamedTuple):
    """Convolutions of equal shapes that share a launch: their places in a list, and tables of x and g if several do."""

    members: list[int]
    plan: _Plan
    x: Tensor | None = None
    g: Tensor | None = None


def _groups(products: Sequence[ConvProduct], work: str) -> list[_Group]:
    """Group convolutions for launches, with all tables in one copy. Those that are copied first are alone."""
    plans, keys = [product.plan(work) for product in products], []
    of_x, of_g = [product.x.data_ptr() for product in products], [product.g.data_ptr() for product in products]
    for place, (x, g, *_) in enumerate(products):
        shares = x.is_contiguous() and g.is_contiguous() and (of_x[place] | of_g[place]) % 16 == 0
        keys.append((id(plans[place]), -1 if shares else place))
    groups: list[_Group] = []
    for members in alike(keys).values():
        plan = plans[members[0]]
        most = max(1, LEAST_COPIES // (plan.held + 4 * plan.outs * plan.d))
        groups += [_Group(members[first : first + most], plan) for first in range(0, len(members), most)]
    several = [at for at, group in enumerate(groups) if len(group.members) > 1]
    rows = [[pointers[i] for i in groups[at].members] for at in several for pointers in (of_x, of_g)]
    tables = table_on(products[0].g.device, *rows) if rows else []
    for at, x, g in zip(several, tables[::2], tables[1::2], strict=True):
        groups[at] = groups[at]._replace(x=x, g=g)
    return groups


def _prepared(products: Sequence[ConvProduct], group: _Group) -> tuple[Tensor, Tensor]:
    """Return x and g as the kernels read them: tables, the tensors themselves, or copies."""
    at, plan = products[0].geometry, group.plan
    xs, gs = [product.x for product in products], [product.g for product in products]
    if plan.copied:
        g = _in_order(gs, plan.missing) if group.g is None or plan.missing else group.g
        return _shifted_copies(_in_order(xs) if group.x is None else group.x, xs, gs[0].shape[-1], at, plan), g
    if group.x is not None and group.g is not None and not plan.held:
        return group.x, group.g
    if plan.picks:
        met: Any = (..., *(slice(None, None, step) for step in at.stride))
        xs = [at.padded(x)[met] for x in xs]
    if plan.missing:  # an image is one line
        xs, gs = ([each.flatten(-len(at.kernel)) for each in side] for side in (xs, gs))
    return _in_order(xs, plan.missing), _in_order(gs, plan.missing)


def _in_order(tensors: Sequence[Tensor], missing: int = 0) -> Tensor:
    """Return tensors one after the other, their lines padded with zeros to whole words: a thread copies several."""
    first = tensors[0]
    if len(tensors) == 1:
        return pad_zeros(first.contiguous(), (0, missing)) if missing else first.contiguous()
    line = first.shape[-1]
    make = first.new_zeros if missing else first.new_empty
    made = make((len(tensors), *first.shape[:-1], line + missing))
    torch._foreach_copy_(list(made[..., :line].unbind(0)), list(tensors))
    return made


def _shifted_copies(operand: Tensor, xs: Sequence[Tensor], line: int, at: Geometry, plan: _Plan) -> Tensor:
    """Return copies of several x, (members, B·k, C, copies, rows, line), padded with zeros. line: of g."""
    n, x = len(at.kernel), xs[0]
    height, width = x.shape[-2:] if n == 2 else (1, x.shape[-1])
    images, channels = x.numel() // math.prod(x.shape[-n - 1 :]), x.shape[-n - 1]
    made = x.new_empty((len(xs), images, channels, plan.copies, plan.rows, line + plan.missing))
    # A kernel of one row meets every stride-th row of x only.
    stride, top = (at.stride[0], at.padding[0]) if n == 2 else (1, 0)
    words = (line + plan.missing) // plan.copying["WORD"]
    blocks = -(-channels * plan.rows * words // plan.copying["BLOCK"])
    integers = [images, blocks, channels, height, width, plan.rows, words, line, stride, at.stride[-1], top]
    integers += [at.padding[-1], at.dilation[-1]]
    launch(_shifted_copy_kernel, len(xs) * images * blocks, (operand, made, *integers), plan.copying)
    name = _shifted_copy_kernel.__name__
    announce(lambda: Launch(name=name, family=COPY, reads=[*xs], writes=[made], flops=0))
    return made


def serves_conv(x: Tensor, g: Tensor, geometry: Geometry, *, backend: Backend = "auto") -> bool:
    """Return True if the kernels take this convolution."""
    served = x.dtype == g.dtype and x.device == g.device and _is_served(x.shape, g.shape, geometry.kernel, g.dtype)
    return use_triton(backend, g.device, served=served, why_not="dtype, shape or three dimensions")


@lru_cache(maxsize=1024)  # asked by every layer in every step
def _is_served(x: torch.Size, g: torch.Size, kernel: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (
        len(kernel) <= 2
        and dtype in TRITON_DTYPES
        and 0 < x.numel() * kernel[-1] < 2**28 * x[0]  # places in a sample's copies are 32-bit numbers
        and 0 < g.numel() < 2**30 * g[0]
    )


@allocates(PER_SAMPLE_GRADIENTS, "aten::new_empty")
def conv_products(
    product: ConvProduct, dtype: torch.dtype | None, *, directions: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """Return values (B, O, d) in `dtype`, or None if no dtype is given, and parts of their squared norms.

    Parts are (B, n) float64, to be added up. With `directions`, (O, d) float32, they are (B, columns, 3, O): of each
    row the squares, the sum, and the product with its direction.
    """
    new = product.g.new_empty
    without_values = FOR_NORMS if directions is None else FOR_DIRECTIONS
    work = without_values if dtype is None else FOR_VALUES
    plan = product.plan(work)
    values = None if dtype is None else new((plan.batch, plan.outs, plan.d), dtype=dtype)
    shape = (plan.batch, plan.tiles) if directions is None else (plan.batch, plan.columns, 3, plan.outs)
    parts = new(shape, dtype=torch.float64)
    for samples, some in product.pieces(plan):
        kept = None if values is None else _some(values, samples)
        _measure([some], _Group([0], some.plan(work)), _some(parts, samples), kept, directions)
    return values, parts


@allocates(PER_SAMPLE_GRADIENTS, "aten::new_empty")
def conv_norms(products: Sequence[ConvProduct]) -> list[Tensor]:
    """Return parts of the squared norms of each convolution, (B, n) float64. Those of equal shapes share launches."""
    found: dict[int, Tensor] = {}
    for group in _groups(products, FOR_NORMS):
        own, plan = [products[at] for at in group.members], group.plan
        if len(own) == 1:
            found[group.members[0]] = conv_products(own[0], None)[1]
            continue
        parts = own[0].g.new_empty((len(own), plan.batch, plan.tiles), dtype=torch.float64)
        _measure(own, group, parts)
        found.update(zip(group.members, parts.unbind(0), strict=True))
    return [found[at] for at in range(len(products))]


def _measure(
    products: Sequence[ConvProduct],
    group: _Group,
    parts: Tensor,
    values: Tensor | None = None,
    directions: Tensor | None = None,
) -> None:
    """Fill `parts`, and `values` if given: see `conv_products`."""
    (x, g), plan, members = _prepared(products, group), group.plan, len(products)
    if plan.turns:
        kernel, (each, shares) = _conv_norms_kernel, plan.shared_out(plan.turns // members)
        arguments: tuple[Any, ...] = (x, g, parts, directions, plan.batch, each, members, *plan.integers)
    else:
        kernel, shares = _conv_products_kernel, plan.batch
        arguments = (x, g, values, parts, directions, members, *plan.integers)
    launch(kernel, members * shares * plan.tiles, arguments, plan.constants)
    reads = _read(products, x, g)
    _announce(kernel, reads, [parts] if values is None else [parts, values], members * plan.flops)


def conv_sum(product: ConvProduct, scale: Tensor) -> Tensor:
    """Return Σ_b scale_b V_b, (O, d) float32."""
    total: Tensor | None = None
    scale = scale.contiguous()
    for samples, some in product.pieces(product.plan(FOR_SUM)):
        group = _Group([0], some.plan(FOR_SUM))
        (made,) = _sum([some], group, _some(scale, samples)).unbind(0)
        total = made if total is None else total.add_(made)
    assert total is not None
    return total


def conv_sums(products: list[ConvProduct], scale: Tensor) -> list[Tensor]:
    """Return `conv_sum` of each, and empty the list. Those of equal shapes share launches and memory."""
    found: dict[int, Tensor] = {}
    scale, count, groups = scale.contiguous(), len(products), _groups(products, FOR_SUM)
    waiting: list[ConvProduct | None] = [*products]
    products.clear()
    for group in groups:
        own = [product for at in group.members if (product := waiting[at]) is not None]
        for at in group.members:
            waiting[at] = None
        sums = [conv_sum(own[0], scale)] if len(own) == 1 else _sum(own, group, scale).unbind(0)
        found.update(zip(group.members, sums, strict=True))
    return [found[at] for at in range(count)]


@allocates(GRADIENTS, "aten::new_empty")
def _sum(products: Sequence[ConvProduct], group: _Group, scale: Tensor) -> Tensor:
    """Return the sums of convolutions that share a launch, (members, O, d) float32."""
    (x, g), plan, members = _prepared(products, group), group.plan, len(products)
    each, parts = plan.shared_out(plan.sum_programs // members)
    sums = products[0].g.new_empty((members, parts, plan.outs, plan.d), dtype=torch.float32)
    arguments = (x, g, sums, scale, plan.batch, each, MIN_SCALE, members, *plan.integers)
    launch(_conv_sum_kernel, members * parts * plan.tiles, arguments, plan.constants)
    _announce(_conv_sum_kernel, [*_read(products, x, g), scale], [sums], members * plan.flops)
    return sums[:, 0] if parts == 1 else sums.sum(1)


def _some(rows: Tensor, samples: slice) -> Tensor:
    """Return the rows of some samples; of all, the tensor itself."""
    return rows if samples is _ALL else rows[samples]


def _read(products: Sequence[ConvProduct], x: Tensor, g: Tensor) -> list[Tensor]:
    """Return what a launch reads: x and g, or what they are tables of."""
    xs, gs = [product.x for product in products], [product.g for product in products]
    return [*(xs if x.dtype == torch.int64 else [x]), *(gs if g.dtype == torch.int64 else [g])]


def _announce(kernel: Any, reads: list[Tensor], writes: list[Tensor], flops: int) -> None:
    announce(lambda: Launch(name=kernel.__name__, family=GEMM, reads=reads, writes=writes, flops=flops))

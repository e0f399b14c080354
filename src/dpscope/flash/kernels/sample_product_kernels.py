"""The kernel behind sample_products.py, in Gluon, for Hopper (compute capability 9.0), and its launch.

A tile is 128 rows × 256 columns of one sample's V_b = G_bᵀX_b. A program works on one tile after the other with

    a producer   one warp, which copies steps of T from both operands into a ring in shared memory, and runs ahead into
                 the next tile;
    two halves   a warpgroup each, with 64 of the tile's rows; both multiply by the same columns of X.

The first half begins each tile LEAD steps before the second. So one half rounds, squares and stores its rows while the
other half's multiplications keep the tensor cores busy; with both at the same step, the tensor cores would wait.

Both operands lie with T outermost ("MN-major"); wgmma takes them so, straight from shared memory. Copies give zeros
past the end of a sample and of a row, and stores leave out what lies past it: no size needs a case of its own.

Only sample_products.py imports this file, at its first call, because these imports need Triton 3.6 or later.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="misc, attr-defined"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import builtin

from dpscope.flash.kernels.triton_runtime import constant, device_index, launch_on
from dpscope.vocabulary.components import PER_SAMPLE_GRADIENTS
from dpscope.vocabulary.phases import allocates

_ROWS = constant(64)  # of a half; a tile has two
_COLUMNS = constant(256)
_STORED = constant(128)  # columns that are stored at a time: both in one go would leave the ring too little memory
_BAND = constant(16)  # tile rows whose tiles run together, so that they share X's columns in L2
_LEAST_SQUARES = constant(2.0**-80)  # of a half tile: below it, squares that float32 does not hold may count
_SHRINK = constant(2.0**-100)
_GROW = constant(2.0**100)
_SHRUNK = constant(2.0**200)
_GROWN = constant(2.0**-200)

_REGISTERS = 168  # a thread at launch: 3 × 128 threads; the halves then take 240, and the producer 24

# As they are called from Triton 3.9 on, and before.
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_compiled: dict[tuple[int, int, int, int], Any] = {}  # by device, block_k, stages and lead


@gluon.jit
def _place(tile, rows, columns):
    """Sample, row and column of a tile: samples outermost, then bands of rows, and a band column by column."""
    each = rows * columns
    rest = tile % each
    first = rest // (_BAND * columns) * _BAND
    height = gl.minimum(rows - first, _BAND)
    rest = rest % (_BAND * columns)
    return tile // each, first + rest % height, rest // height


@builtin
def _reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Shared memory with another shape and layout."""
    reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret  # before Triton 3.9
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def _copy_steps(g_rows, x_rows, rings, barriers, grid, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Produce: wait until a slot of the ring is empty, and copy the next step into it."""
    g_ring, x_ring = rings
    full, empty, _ = barriers
    tiles, rows, columns, steps = grid
    at = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, m, n = _place(tile, rows, columns)
        for k in range(steps):
            slot = at % STAGES
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready, (2 * _ROWS + _COLUMNS) * BLOCK_K * 2)
            for half in gl.static_range(2):
                place = [b, k * BLOCK_K, (m * 2 + half) * _ROWS]
                _copy_in(g_rows, place, ready, g_ring.index(slot * 2 + half))
            _copy_in(x_rows, [b, k * BLOCK_K, n * _COLUMNS], ready, x_ring.index(slot))
            at += 1


@gluon.jit
def _scaled_squares(v, factor):
    w = v.to(gl.float32) * factor
    return gl.sum(gl.sum(w * w, axis=1), axis=0)


@gluon.jit
def _sum_of_squares(v):
    """Return Σ v² in float64: summed in float32 if that holds it, else again of values scaled by a power of two."""
    total = _scaled_squares(v, 1.0)
    wide = total.to(gl.float64)
    held = (total >= _LEAST_SQUARES) & (total < float("inf"))
    if not held:  # inf and NaN come here as well, and stay what they are
        large = total >= _LEAST_SQUARES
        total = _scaled_squares(v, gl.where(large, _SHRINK, _GROW))
        wide = total.to(gl.float64) * gl.where(large, _SHRUNK, _GROWN)
    return wide


@gluon.jit
def _store(v_rows, place, buffer, flat, v):
    tma.store_wait(0)
    flat.store(v)
    fence_async_shared()
    _copy_out(v_rows, place, buffer)


@gluon.jit
def _multiply(
    v_rows, squares, rings, buffers, barriers, grid,
    HALF: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Consume one half of every tile: multiply the copied steps, then round, square and store."""
    g_ring, x_ring = rings
    full, empty, lead = barriers
    tiles, rows, columns, steps = grid
    DTYPE: gl.constexpr = v_rows.dtype
    G: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, _ROWS], DTYPE)
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, _COLUMNS], DTYPE)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _STORED], DTYPE)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    staggered = steps >= STAGES  # the ring holds LEAD steps for the second half, and more for the first
    buffer = buffers.index(HALF)
    flat = _reinterpret(buffer, DTYPE, [_ROWS, _STORED], V)
    at = 0
    count = 0  # of tiles that are done
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, m, n = _place(tile, rows, columns)
        if HALF == 1:
            mbarrier.wait(lead.index(0), count & 1, pred=staggered)
        acc = gl.zeros((_ROWS, _COLUMNS), gl.float32, ACC)
        for k in range(steps):
            slot = at % STAGES
            mbarrier.wait(full.index(slot), at // STAGES & 1)
            g = _reinterpret(g_ring.index(slot * 2 + HALF), DTYPE, [BLOCK_K, _ROWS], G).permute((1, 0))
            x = _reinterpret(x_ring.index(slot), DTYPE, [BLOCK_K, _COLUMNS], X)
            acc = warpgroup_mma(g, x, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=k > 0)  # the step before is done
            if HALF == 0:  # noqa: SIM102 (known when compiled; the next is not)
                if staggered & (k == LEAD - 1):
                    mbarrier.arrive(lead.index(0))
            at += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
        v = acc.to(DTYPE)
        left, right = v.reshape([_ROWS, 2, _STORED]).permute(0, 2, 1).split()
        row = (m * 2 + HALF) * _ROWS
        _store(v_rows, [b, row, n * _COLUMNS], buffer, flat, left)
        gl.store(
            squares + (tile.to(gl.int64) * 2 + HALF), _sum_of_squares(v)
        )  # while the left columns are being stored
        _store(v_rows, [b, row, n * _COLUMNS + _STORED], buffer, flat, right)
        count += 1  # noqa: SIM113 (a kernel has no enumerate)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "rows", "columns", "steps"])
def _sample_products_kernel(
    g_rows, x_rows, v_rows, squares, tiles, rows, columns, steps,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Compute tiles of all samples. squares: (tiles, 2), of the stored values; rows, columns: tiles of a sample."""
    g_ring = gl.allocate_shared_memory(g_rows.dtype, [STAGES * 2, 1, BLOCK_K, _ROWS], g_rows.layout)
    x_ring = gl.allocate_shared_memory(x_rows.dtype, [STAGES, 1, BLOCK_K, _COLUMNS], x_rows.layout)
    buffers = gl.allocate_shared_memory(v_rows.dtype, [2, 1, _ROWS, _STORED], v_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lead.index(0), count=1)
    fence_async_shared()
    rings = (g_ring, x_ring)
    barriers = (full, empty, lead)
    grid = (tiles, rows, columns, steps)
    gl.warp_specialize(
        [
            (_multiply, (v_rows, squares, rings, buffers, barriers, grid, gl.constexpr(0), BLOCK_K, STAGES, LEAD)),
            (_multiply, (v_rows, squares, rings, buffers, barriers, grid, gl.constexpr(1), BLOCK_K, STAGES, LEAD)),
            (_copy_steps, (g_rows, x_rows, rings, barriers, grid, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


class _Rows(TensorDescriptor):
    """A tensor's descriptor, without checks that take longer than the launch: sample_products.py has made them."""

    def __init__(self, tensor: Tensor, block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides = tensor, tensor.shape, tensor.stride()
        self.block_shape, self.layout = block_shape, layout


@cache
def _blocks(block_k: int) -> list[tuple[list[int], Any]]:
    """Return the block that one copy moves of g, x and the values, and its layout in shared memory."""
    shapes = [1, block_k, _ROWS.value], [1, block_k, _COLUMNS.value], [1, _ROWS.value, _STORED.value]
    return [(shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)) for shape in shapes]


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@allocates(PER_SAMPLE_GRADIENTS, "aten::empty")
def launch(
    x: Tensor, g: Tensor, block_k: int, stages: int, lead: int, programs: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return values (B, p, d), and squares (B, parts) float64. block_k: positions a step; stages: steps in the ring.

    A compiled kernel is called directly, because Triton would read the types of all arguments once more,
    which for descriptors takes longer than everything else here.
    """
    (batch, length, p), d = g.shape, x.shape[2]
    rows, columns = -(-p // (2 * _ROWS.value)), -(-d // _COLUMNS.value)
    tiles = batch * rows * columns
    values = torch.empty((batch, p, d), dtype=g.dtype, device=g.device)
    squares = torch.empty((batch, rows * columns * 2), dtype=torch.float64, device=g.device)
    g_block, x_block, v_block = _blocks(block_k)
    described = _Rows(g, *g_block), _Rows(x, *x_block), _Rows(values, *v_block)
    arguments = (*described, squares, tiles, rows, columns, -(-length // block_k), block_k, stages, lead)
    index = device_index(g.device)
    key = (index, block_k, stages, lead)
    programs = min(tiles, programs or _multiprocessors(index))
    with launch_on(g.device):
        kernel = _compiled.get(key)
        if kernel is None:
            starter = _sample_products_kernel[(programs,)]
            _compiled[key] = starter(*arguments, num_warps=4, maxnreg=_REGISTERS)
        else:
            kernel[programs, 1, 1](*arguments)
    return values, squares

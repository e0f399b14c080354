"""The kernels of Gram norms: tiles by tensor cores, and what float32 does not hold in float64 (see gram_norms.py)."""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dpscope.flash.kernels.triton_runtime import constant, dot, jit, tl

FLOOR, FLOOR_FLOAT64 = 2.0**-14, 2.0**-40
"""The least share of S² a unit's squared norm is taken to be."""

SMALL = 2.0**-90
"""Squares below it may have lost more than rounding: products below UNDERFLOW count as zero."""

UNDERFLOW = 2.0**-126

NEGLIGIBLE = 2.0**-40
"""Of a square: what may be lost of it."""

_SMALL, _UNDERFLOW, _NEGLIGIBLE, _FLOOR, UNIT_COLUMNS = map(constant, (SMALL, UNDERFLOW, NEGLIGIBLE, FLOOR, 6))


@jit
def _gram_tile(
    segments,
    first,
    count,
    sample,
    row,
    col,
    length,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply rows [row, row+BLOCK_T) by rows [col, col+BLOCK_S) of one sample, summed over segments, float32.

    PRECISION: of products of float32 operands.
    """
    acc = tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32)
    for segment in range(first, first + count):
        entry = segments + segment * 4
        width = tl.load(entry + 1).to(tl.int32)
        stride_t = tl.load(entry + 3)
        base = tl.load(entry).to(tl.pointer_type(DTYPE)) + sample.to(tl.int64) * tl.load(entry + 2)
        if TMA:  # reads past T or past the width give zeros
            shape = [length, width]
            rows = tl.make_tensor_descriptor(base, shape, [stride_t, 1], [BLOCK_T, BLOCK_K])
            if BLOCK_T == BLOCK_S:
                cols = rows
            else:
                cols = tl.make_tensor_descriptor(base, shape, [stride_t, 1], [BLOCK_S, BLOCK_K])
            for k in range(0, width, BLOCK_K):
                acc = dot(rows.load([row, k]), cols.load([col, k]).T, acc, PRECISION)
        else:
            if ALIGNED:  # 16-byte asynchronous copies need to know it
                VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
                base = tl.multiple_of(base, 16)
                stride_t = tl.multiple_of(stride_t, VECTOR)
                width = tl.multiple_of(width, VECTOR)
            t = row + tl.arange(0, BLOCK_T)
            s = col + tl.arange(0, BLOCK_S)
            f = tl.arange(0, BLOCK_K)
            row_pointers = base + t.to(tl.int64)[:, None] * stride_t + f[None, :]
            col_pointers = base + s.to(tl.int64)[None, :] * stride_t + f[:, None]
            for k in range(0, width, BLOCK_K):
                a = tl.load(row_pointers, mask=(t < length)[:, None] & (f[None, :] < width - k), other=0.0)
                b = tl.load(col_pointers, mask=(s < length)[None, :] & (f[:, None] < width - k), other=0.0)
                acc = dot(a, b, acc, PRECISION)
                row_pointers += BLOCK_K
                col_pointers += BLOCK_K
    return acc


@jit
def _store_sums(
    partials, x_gram, g_gram, row, col, length, x_width, g_width, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Store Σ w_ts x_gram g_gram of the tile (w: 2 below the diagonal, 1 on it, 0 above), Σ_t ‖x_t‖‖g_t‖ and `lost`."""
    program = tl.program_id(0)
    t = row + tl.arange(0, BLOCK_T)[:, None]
    s = col + tl.arange(0, BLOCK_S)[None, :]
    products = x_gram * g_gram
    weight = tl.where(t > s, 2.0, tl.where(t == s, 1.0, 0.0))
    tl.store(partials + program, tl.sum(products * weight))
    lengths = 0.0
    lost = 0.0
    if row < col + BLOCK_S:  # no tile lies above the diagonal: this one meets it
        lengths = tl.sum(tl.sqrt(tl.where(t == s, products, 0.0)))
        at_risk = (t == s) & (t < length) & ((x_gram < _SMALL) | (g_gram < _SMALL))
        most = tl.sqrt(x_gram + x_width * _UNDERFLOW) * tl.sqrt(g_gram + g_width * _UNDERFLOW)
        lost = tl.sum(tl.where(at_risk, most, 0.0))
    tl.store(partials + tl.num_programs(0) + program, lengths)
    tl.store(partials + 2 * tl.num_programs(0) + program, lost)


@jit
def _gram_kernel(
    tile_table,
    unit_table,
    segments,
    partials,
    batch,
    n_tiles,
    length,
    X_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of one sample of one unit per program. partials: (3, units, B, tiles), see _store_sums."""
    program = tl.program_id(0)
    tile = tile_table + (program % n_tiles) * 2
    sample = (program // n_tiles) % batch
    unit = unit_table + (program // n_tiles // batch) * UNIT_COLUMNS
    row = tl.load(tile).to(tl.int32) * BLOCK_T
    col = tl.load(tile + 1).to(tl.int32) * BLOCK_S
    x_first = tl.load(unit).to(tl.int32)
    x_count = tl.load(unit + 1).to(tl.int32)
    g_first = tl.load(unit + 2).to(tl.int32)
    g_count = tl.load(unit + 3).to(tl.int32)
    # fmt: off
    x_gram = _gram_tile(segments, x_first, x_count, sample, row, col, length,
                        X_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED, PRECISION)
    g_gram = _gram_tile(segments, g_first, g_count, sample, row, col, length,
                        G_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED, PRECISION)
    # fmt: on
    _store_sums(partials, x_gram, g_gram, row, col, length, tl.load(unit + 4), tl.load(unit + 5), BLOCK_T, BLOCK_S)


@jit
def _gram_ids_kernel(
    tile_table,
    unit_table,
    segments,
    partials,
    batch,
    n_tiles,
    length,
    G_DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the same for x_t·x_s = [ids_t = ids_s ≠ padding]; g is not read for tiles in which no ids match."""
    program = tl.program_id(0)
    tile = tile_table + (program % n_tiles) * 2
    sample = (program // n_tiles) % batch
    unit = unit_table + (program // n_tiles // batch) * UNIT_COLUMNS
    row = tl.load(tile).to(tl.int32) * BLOCK_T
    col = tl.load(tile + 1).to(tl.int32) * BLOCK_S
    ids = tl.load(unit).to(tl.pointer_type(tl.int64)) + sample.to(tl.int64) * length
    padding = tl.load(unit + 1)
    g_first = tl.load(unit + 2).to(tl.int32)
    g_count = tl.load(unit + 3).to(tl.int32)
    t = row + tl.arange(0, BLOCK_T)
    s = col + tl.arange(0, BLOCK_S)
    row_ids = tl.load(ids + t, mask=t < length, other=-1)
    col_ids = tl.load(ids + s, mask=s < length, other=-2)
    match = (row_ids[:, None] == col_ids[None, :]) & (row_ids != padding)[:, None]
    if tl.max(match.to(tl.int32)) > 0:
        # fmt: off
        g_gram = _gram_tile(segments, g_first, g_count, sample, row, col, length,
                            G_DTYPE, BLOCK_T, BLOCK_S, BLOCK_K, TMA, ALIGNED, PRECISION)
        # fmt: on
        x_gram = match.to(tl.float32)
        _store_sums(partials, x_gram, g_gram, row, col, length, 0, tl.load(unit + 5), BLOCK_T, BLOCK_S)
    else:
        for sum_of in range(3):
            tl.store(partials + sum_of * tl.num_programs(0) + program, 0.0)


@jit
def _wide_rows(segments, segment, sample, start, k, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """Load features [k, k+K) of rows [start, start+BLOCK) of one segment, float64."""
    entry = segments + segment * 4
    base = tl.load(entry).to(tl.pointer_type(DTYPE)) + sample.to(tl.int64) * tl.load(entry + 2)
    t = start + tl.arange(0, BLOCK)
    f = k + tl.arange(0, K)
    inside = (t < length)[:, None] & (f < tl.load(entry + 1))[None, :]
    values = tl.load(base + t.to(tl.int64)[:, None] * tl.load(entry + 3) + f[None, :], mask=inside, other=0.0)
    return values.to(tl.float32).to(tl.float64)


@jit
def _wide_gram(
    segments, first, count, sample, row, col, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Compute a tile of the Gram matrix in float64."""
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float64)
    for segment in range(first, first + count):
        width = tl.load(segments + segment * 4 + 1).to(tl.int32)
        for k in range(0, width, K):
            rows = _wide_rows(segments, segment, sample, row, k, length, DTYPE, BLOCK, K)
            cols = _wide_rows(segments, segment, sample, col, k, length, DTYPE, BLOCK, K)
            acc += tl.sum(rows[:, None, :] * cols[None, :, :], axis=2)
    return acc


@jit
def _largest(segments, first, count, sample, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """Return the largest |value| of a sample; NaN or inf if it holds one."""
    peaks = tl.zeros((BLOCK, K), dtype=tl.float64)
    for segment in range(first, first + count):
        width = tl.load(segments + segment * 4 + 1).to(tl.int32)
        for row in range(0, length, BLOCK):
            for k in range(0, width, K):
                values = tl.abs(_wide_rows(segments, segment, sample, row, k, length, DTYPE, BLOCK, K))
                peaks = tl.where(values <= peaks, peaks, values + peaks * 0.0)  # NaN stays, once it is in
    return tl.sum(peaks)


@jit
def _gram_finish_kernel(
    unit_table,
    segments,
    sums,
    squares,
    batch,
    length,
    X_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
):
    """Finish one sample of one unit per program. sums: (3, units, B) of _store_sums; squares: (units, B), float64.

    X_DTYPE None: ids. Sums within float32's range are floored and stored. The others are computed again in float64.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    square = tl.load(sums + program).to(tl.float64)
    lengths = tl.load(sums + programs + program).to(tl.float64)
    lost = tl.load(sums + 2 * programs + program).to(tl.float64)
    good = (tl.abs(square) < float("inf")) & (lengths < float("inf")) & (lost * lost <= square * _NEGLIGIBLE)
    if not good:
        sample = program % batch
        unit = unit_table + (program // batch) * UNIT_COLUMNS
        g_first = tl.load(unit + 2).to(tl.int32)
        g_count = tl.load(unit + 3).to(tl.int32)
        largest = _largest(segments, g_first, g_count, sample, length, G_DTYPE, BLOCK, K)
        if X_DTYPE is not None:
            x_first = tl.load(unit).to(tl.int32)
            x_count = tl.load(unit + 1).to(tl.int32)
            largest *= _largest(segments, x_first, x_count, sample, length, X_DTYPE, BLOCK, K)
        square = largest * 0.0  # NaN where a value is not finite
        lengths = square
        if largest > 0.0 and largest < float("inf"):
            for row in range(0, length, BLOCK):
                t = row + tl.arange(0, BLOCK)
                for col in range(0, row + BLOCK, BLOCK):
                    s = col + tl.arange(0, BLOCK)
                    products = _wide_gram(segments, g_first, g_count, sample, row, col, length, G_DTYPE, BLOCK, K)
                    if X_DTYPE is not None:
                        products *= _wide_gram(segments, x_first, x_count, sample, row, col, length, X_DTYPE, BLOCK, K)
                    else:
                        ids = tl.load(unit).to(tl.pointer_type(tl.int64)) + sample.to(tl.int64) * length
                        row_ids = tl.load(ids + t, mask=t < length, other=-1)
                        col_ids = tl.load(ids + s, mask=s < length, other=-2)
                        match = (row_ids[:, None] == col_ids[None, :]) & (row_ids != tl.load(unit + 1))[:, None]
                        products = tl.where(match, products, 0.0)
                    diagonal = t[:, None] == s[None, :]
                    square += tl.sum(
                        tl.where(t[:, None] > s[None, :], 2.0 * products, tl.where(diagonal, products, 0.0))
                    )
                    lengths += tl.sum(tl.sqrt(tl.where(diagonal, products, 0.0)))
    floor = lengths * lengths * _FLOOR
    tl.store(squares + program, tl.where(square < floor, floor, square))

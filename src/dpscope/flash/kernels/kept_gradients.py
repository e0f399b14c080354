"""Norms, clipped sums and projections of stored per-sample gradients: one read each, all parameters in one launch.

If a parameter's per-sample gradients v_b are kept as values: (B, *shape), two results of them are needed:

    norms   Σ ‖v_b‖² over all parameters, per sample;
    sums    Σ_b c_b v_b, written, or added to what is there.

Guarantee: norms are of the values that are stored, and the sums are of those same values, whatever dtype they were
rounded to: a sample's share of the sum is at most C up to the rounding of float32. A sample whose factor is zero or NaN
has no share: what it holds is replaced by zero, not multiplied, so that inf and NaN never reach a sum.

Every finite value has its square. A program adds up its chunk's squares in float32; where that sum is not finite, or
so small that squares below 2⁻¹²⁶ may be missing from it, the chunk (by now in L2) is added up again in float64, which
holds the square of every float32. What is left are inf and NaN, which make their sample's norm inf or NaN: samples that
are not finite are found in the same read. Chunks' squares are added up in float64.

Sums are accumulated in float32, sample by sample, a few samples' loads in flight together. `sum_of_samples` is also
what the fused update reads (fused_update.py): there the sum never leaves the registers.

Served by the kernels: bfloat16, float16 and float32, dtypes mixed freely; other layouts are copied first. float64, and
outputs whose elements do not lie in order, take the fallback.

Checkpointed blocks that run again are compared by projections of their values on fixed signs:

    projections_b = Σ_i s_i v_bi,   squares_b = Σ_i v_bi²          s_i = ±1, a function of the tensor's number and of i

A difference δ between two sets of values moves a sample's projection by about ‖δ‖, whatever its direction (constant
over all elements, too: the signs are hashed, not alternating). Sums are taken in float32, those of chunks in float64.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.kernels.tensor_lists import Cut, chunk_size, find_tensor, list_launches, pointer_at, size_at
from dpscope.flash.kernels.triton_runtime import Backend, constant, jit, slices, tl
from dpscope.flash.torch_side.captures import device_cache
from dpscope.vocabulary.phases import CLIPPING, Launch, announce

SAMPLE_CUT = Cut(chunk=32768, block=8192)
"""Of kernels that add up something of each sample. A block is 64 bytes of bfloat16 a thread: four loads of 16 bytes."""

SAMPLES_AT_ONCE = 4
"""Samples whose values are loaded before the first is added."""

LEAST_SQUARE = 2.0**-80
"""Of a chunk: below it, squares that float32 does not hold (at most 2⁻¹²⁶ each) may count."""


SMALL = 2**13
"""The fallback takes tensors of at most this many elements a sample side by side: a call costs more than they do."""

_LEAST_SQUARE = constant(LEAST_SQUARE)
_WIDE_BLOCK = constant(1024)  # few registers: those of the rare case are taken from all


def kept_norms_squared(values: Sequence[Tensor], *, backend: Backend = "auto") -> Tensor:
    """Return Σ over tensors (B, …) of ‖values_b‖²: (B,) float64, inf or NaN for samples that are not finite."""
    if not values:
        raise ValueError("kept_norms_squared needs at least one tensor")
    values = list(map(Tensor.contiguous, values))
    total = torch.zeros(len(values[0]), dtype=torch.float64, device=values[0].device)
    made, left = sums_of_chunks(_kept_norms_kernel, values, [0] * len(values), total.shape, backend=backend)
    for _, partials in made:
        total += partials.sum(-1)
    for rows, _ in _rows(values, left):
        total += row_norms_squared(rows)
    return total


def kept_norms_apart(values: Sequence[Tensor], *, backend: Backend = "auto") -> list[tuple[Sequence[int], Tensor]]:
    """Return ‖values_b‖² of each tensor (B, …): numbers of tensors, and their squares, (tensors, B) float64."""
    values = list(map(Tensor.contiguous, values))
    made, left = sums_of_chunks(_kept_norms_kernel, values, [0] * len(values), (len(values[0]),), backend=backend)
    found: list[tuple[Sequence[int], Tensor]] = []
    for members, partials in made:
        chunks = [-(-values[i].shape[1:].numel() // SAMPLE_CUT.chunk) for i in members]
        apart = max(chunks) > 1
        squares = torch.stack([each.sum(1) for each in torch.split(partials, chunks, 1)]) if apart else partials.mT
        found.append((members, squares))
    if left:
        found.append((left, torch.stack([row_norms_squared(values[i]) for i in left])))
    return found


def sums_of_chunks(
    kernel: Any, values: Sequence[Tensor], starts: Sequence[int], shape: tuple[int, ...], *more: int, backend: Backend
) -> tuple[list[tuple[list[int], Tensor]], list[int]]:
    """Return the results of `kernel` on contiguous tensors (B, …), one launch after the other, and the other tensors.

    A result is the numbers of tensors, and sums of their chunks, (*shape, chunks) float64; `shape` ends with B. The
    kernel gets the arguments of a list of tensors (`tensor_lists`), the number of chunks, its result, and `more`.
    `starts`: a number for each tensor.
    """
    batch, made = shape[-1], []
    launches, left = list_launches([values], starts, 0, 0, backend, stacked=0, samples=batch, cut=SAMPLE_CUT)
    for launch in launches:
        partials = torch.empty((*shape, launch.programs), dtype=torch.float64, device=launch.device)
        launch.run(kernel, launch.programs, partials, *more, each=batch, DTYPE=launch.dtypes[0])
        read = [values[i] for i in launch.members]
        announce(partial(Launch, name=kernel.__name__, family=CLIPPING, reads=read, writes=[partials]))
        made.append((launch.members, partials))
    return made, left


def kept_sums(
    values: Sequence[Tensor],
    factors: Tensor,
    *,
    rows: Sequence[int] = (),
    outs: Sequence[Tensor | None] | None = None,
    backend: Backend = "auto",
) -> list[Tensor]:
    """Return Σ_b factors_b · values_b of every tensor (B, *shape), added into its `out` if given.

    factors: (B,), or (G, B); then `rows` says which row is each tensor's. New sums are float32, or float64 for float64
    values. A sum is rounded once to the dtype of its `out`.
    """
    factors = checked_factors(factors, values)
    values = list(map(Tensor.contiguous, values))
    given, rows = outs or [None] * len(values), rows or [0] * len(values)
    results = [
        torch.empty(v.shape[1:], dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
        if out is None
        else out
        for v, out in zip(values, given, strict=True)
    ]
    for add in (False, True):
        chosen = [i for i, out in enumerate(given) if (out is not None) == add]
        if chosen:
            own = [rows[i] for i in chosen]
            _sum([values[i] for i in chosen], factors, own, [results[i] for i in chosen], add, backend)
    return results


def checked_factors(factors: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return factors as (G, B). Check them by the first tensor; launches check that all have as many samples."""
    fits = factors.dim() in (1, 2) and all(v.shape[0] == factors.shape[-1] for v in values[:1])
    if not fits or not factors.is_floating_point():
        raise ValueError(
            f"expected one floating-point factor a sample, got {tuple(factors.shape)} {factors.dtype} for "
            f"{sorted({len(v) for v in values})} samples"
        )
    return (factors if factors.dim() == 2 else factors.unsqueeze(0)).contiguous()


def _sum(
    values: list[Tensor], factors: Tensor, rows: list[int], outs: list[Tensor], add: bool, backend: Backend
) -> None:
    samples = factors.shape[1]
    launches, left = list_launches(
        [outs, values], [0] * len(values), 0, 0, backend, stacked=1, samples=samples, factor_rows=rows
    )
    for launch in launches:
        launch.run(
            _kept_sums_kernel,
            factors,
            samples,
            O_DTYPE=launch.dtypes[0],
            V_DTYPE=launch.dtypes[1],
            ADD=add,
            AT_ONCE=samples_at_once(factors),
        )
        read, written = [values[i] for i in launch.members], [outs[i] for i in launch.members]
        if add:
            torch.autograd.graph.increment_version(written)
            read += written
        announce(
            partial(Launch, name=_kept_sums_kernel.__name__, family=CLIPPING, reads=[*read, factors], writes=written)
        )
    for row in dict.fromkeys(rows[i] for i in left):
        for flat, members in _rows(values, [i for i in left if rows[i] == row]):
            total = sums_by_torch(flat, factors[row])
            for i, piece in zip(members, total.split([outs[i].numel() for i in members]), strict=True):
                (outs[i].add_ if add else outs[i].copy_)(piece.view(outs[i].shape))


def samples_at_once(factors: Tensor | None) -> int:
    """Return how many samples are loaded together. There are two kernels: for a single sample, and for more."""
    return 1 if factors is None or factors.shape[1] == 1 else SAMPLES_AT_ONCE


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def sum_of_samples(values, index, size, factors, row, samples, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """Return Σ_b factors_b · values_b at `index`, float32; without factors, load the sum.

    values: (samples, size); factors: (G, samples), of which `row` is taken.
    """
    if factors is None:
        total = tl.load(values + index, mask=index < size, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, samples, AT_ONCE):
            for k in tl.static_range(AT_ONCE):
                b = first + k
                factor = tl.load(factors + row * samples + b, mask=b < samples, other=0.0).to(tl.float32)
                # The load does not wait for the factor; what a sample without one holds is put aside afterwards.
                # The interpreter of Triton 3.9 takes no mask that is made of a block's and a scalar's.
                value = tl.load(values + b * size + index, mask=index < tl.where(b < samples, size, 0), other=0.0)
                total += tl.where(tl.abs(factor) > 0, factor * value.to(tl.float32), 0.0)
    return total


@partial(jit, do_not_specialize=("n_tensors", "steps", "samples"))
def _kept_sums_kernel(
    key,
    chunk_starts,
    extents,
    rows,
    n_tensors,
    steps,
    factors,
    samples,
    O_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    ADD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one chunk of one parameter per program. rows: (tensors, 2) pointers to out and values."""
    tensor, first = find_tensor(tl.program_id(0), chunk_starts, n_tensors, steps, CHUNK)
    size = size_at(extents + tensor * 3, ALIGNED)
    outs = pointer_at(rows + tensor * 2, O_DTYPE, ALIGNED)
    values = pointer_at(rows + tensor * 2 + 1, V_DTYPE, ALIGNED)
    row = tl.load(extents + tensor * 3 + 2)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        total = sum_of_samples(values, index, size, factors, row, samples, AT_ONCE, BLOCK)
        if ADD:
            total += tl.load(outs + index, mask=index < size, other=0.0).to(tl.float32)
        tl.store(outs + index, total.to(O_DTYPE), mask=index < size)


@partial(jit, do_not_specialize=("n_tensors", "steps", "chunks"))
def _kept_norms_kernel(
    key,
    chunk_starts,
    extents,
    rows,
    n_tensors,
    steps,
    chunks,
    partials,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Square a chunk of one sample per program. rows: (tensors,) pointers to (B, size); partials: (B, chunks)."""
    tensor, first = find_tensor(tl.program_id(0) % chunks, chunk_starts, n_tensors, steps, CHUNK)
    size = size_at(extents + tensor * 3, ALIGNED)
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    values = pointer_at(rows + tensor, DTYPE, ALIGNED) + sample * size
    count = chunk_size(first, size, CHUNK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(0, count, BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=0.0).to(tl.float32)
        squares += value * value
    total = tl.sum(squares).to(tl.float64)
    held = (total >= _LEAST_SQUARE) & (total < float("inf"))
    if not held:
        wide = tl.zeros((_WIDE_BLOCK,), dtype=tl.float64)
        for at in range(0, count, _WIDE_BLOCK):
            index = first + at + tl.arange(0, _WIDE_BLOCK)
            value = tl.load(values + index, mask=index < size, other=0.0).to(tl.float32).to(tl.float64)
            wide += value * value
        total = tl.sum(wide)
    tl.store(partials + tl.program_id(0), total)


# -- torch -------------------------------------------------------------------------------------------------------------


def sums_by_torch(rows: Tensor, factors: Tensor) -> Tensor:
    """Return Σ_b factors_b rows_b, (n,), in float32, or float64 for float64. rows: (B, n), factors: (B,)."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    live = (factors.abs() > 0).unsqueeze(1)
    factors = factors.to(dtype).nan_to_num()
    total = rows.new_empty(rows.shape[1], dtype=dtype)
    for part in slices(rows.shape[1], len(rows) * dtype.itemsize):
        finite = rows[:, part].to(dtype).where(live, 0.0)
        torch.mv(finite.t(), factors, out=total[part])
    return total


def row_norms_squared(rows: Tensor) -> Tensor:
    """Return ‖rows_b‖² in float64, (B,). rows: (B, …).

    On a GPU a row's norm is taken in float32, where squares below 2⁻¹²⁶ count as zero: they are counted as that much,
    so that no norm is too small. Norms above 1e19 overflow there, and the sample is left out.
    """
    rows = rows.reshape(rows.shape[0], 1, -1) if rows.dim() < 3 else rows.flatten(2)
    squares = last_norms(rows).double().square().sum(1)
    underflow = 0.0 if rows.dtype == torch.float64 or rows.device.type == "cpu" else 2.0**-126
    return squares + rows[0].numel() * underflow if underflow and len(rows) else squares


def last_norms(values: Tensor) -> Tensor:
    """Return norms over the last dimension: (..., n) -> (...).

    On a CPU torch adds up squares in few running sums: float32 then loses 1e-5 at n = 10⁴ and a percent at
    10⁷. There it is taken in float64; on a GPU it is a tree of partial sums.
    """
    dtype = torch.float64 if values.device.type == "cpu" else torch.promote_types(values.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=dtype)
    return norms


def _rows(values: Sequence[Tensor], chosen: Sequence[int]) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield the chosen tensors as rows (B, n), with their indices: small ones side by side, others on their own."""
    flat = {i: values[i].reshape(len(values[i]), values[i].shape[1:].numel()) for i in chosen}
    small = [i for i, rows in flat.items() if rows.shape[1] <= SMALL]
    if small:
        yield torch.cat([flat[i] for i in small], 1), small
    for i, rows in flat.items():
        if rows.shape[1] > SMALL:
            yield rows, [i]


# -- projections -------------------------------------------------------------------------------------------------------


_STRIDE = 32 * 40_503
"""Between the numbers of the first elements of two tensors: their signs are others."""


NumberedTensors = tuple[
    Sequence[Tensor], Sequence[int]
]  # tensors (B, …), and the number of each, which gives its signs


def projections(kinds: Mapping[str, NumberedTensors], *, backend: Backend = "auto") -> dict[str, Tensor]:
    """Return projections and squared norms, (2, B) float64, of each kind of tensors. Equal dtypes share a launch."""
    names = [name for name, (values, _) in kinds.items() for _ in values]
    values = [each.contiguous() for own, _ in kinds.values() for each in own]
    numbers = [number for _, own in kinds.values() for number in own]
    batch = len(values[0])
    starts = [number * _STRIDE for number in numbers]
    totals = {name: torch.zeros((2, batch), dtype=torch.float64, device=values[0].device) for name in kinds}
    made, left = sums_of_chunks(_projections_kernel, values, starts, (2, batch), batch, backend=backend)
    for members, partials in made:
        chunks: Counter[str] = Counter()  # tensors of a kind lie side by side
        for i in members:
            chunks[names[i]] += -(-values[i].shape[1:].numel() // SAMPLE_CUT.chunk)
        for name, own in zip(chunks, torch.split(partials, list(chunks.values()), -1), strict=True):
            totals[name] += own.sum(-1)
    for i in left:
        totals[names[i]][0] += _project(values[i], numbers[i])
        totals[names[i]][1] += row_norms_squared(values[i])
    return totals


@partial(jit, do_not_specialize=("n_tensors", "steps", "chunks", "samples"))
def _projections_kernel(
    key,
    chunk_starts,
    extents,
    rows,
    n_tensors,
    steps,
    chunks,
    partials,
    samples,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Project one chunk of one sample per program.

    rows: (tensors,) pointers to (B, size) values; partials: (2, B, chunks).
    """
    tensor, first = find_tensor(tl.program_id(0) % chunks, chunk_starts, n_tensors, steps, CHUNK)
    size = size_at(extents + tensor * 3, ALIGNED)
    number = tl.load(extents + tensor * 3 + 1)
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    values = pointer_at(rows + tensor, DTYPE, ALIGNED) + sample * size
    values += first
    # A hashed word holds the signs of 32 elements: hashing each took as long as reading it.
    lines = tl.arange(0, BLOCK // 32)[:, None]
    places = tl.arange(0, 32)[None, :]
    offsets = lines * 32 + places
    numbers = ((number + first) // 32).to(tl.uint32) + lines.to(tl.uint32)  # in 64 bits it took four times as long
    count = chunk_size(first, size, CHUNK)
    sums = tl.zeros((BLOCK // 32, 32), dtype=tl.float32)
    squares = tl.zeros((BLOCK // 32, 32), dtype=tl.float32)
    for at in range(0, count, BLOCK):
        value = tl.load(values + at + offsets, mask=offsets < count - at, other=0.0).to(tl.float32)
        word = (numbers ^ (numbers >> 16)) * 2246822519
        word = (word ^ (word >> 13)) * 3266489917
        word = word ^ (word >> 16)
        sign = (word << places.to(tl.uint32)) & 0x80000000
        sums += (value.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        squares += value * value
        numbers += BLOCK // 32
    at = sample * chunks + tl.program_id(0) % chunks
    tl.store(partials + at, tl.sum(sums).to(tl.float64))
    tl.store(partials + at + tl.cast(samples, tl.int64) * chunks, tl.sum(squares).to(tl.float64))


# -- torch -------------------------------------------------------------------------------------------------------------


@device_cache(256)
def _signs(count: int, number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count * 1_000 + number)
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).to(device, dtype)


def _project(tensor: Tensor, number: int) -> Tensor:
    """Project a tensor (B, …) to (B,): the sign of an element is that of its row times that of its column."""
    if tensor.dtype == torch.float16:  # sums would overflow
        tensor = tensor.float()
    rows = tensor.reshape(tensor.shape[0], -1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1, 1)
    sums = rows @ _signs(rows.shape[2], number, rows.dtype, rows.device)
    return sums.double() @ _signs(rows.shape[1], number, torch.float64, rows.device)

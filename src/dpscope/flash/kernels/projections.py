"""Each sample's values projected on fixed signs, and its squares: one read, all tensors in one launch.

    projections_b = Σ_i s_i v_bi,   squares_b = Σ_i v_bi²          s_i = ±1, a function of the tensor's number and of i

A difference δ between two sets of values moves a sample's projection by about ‖δ‖, whatever its direction (constant
over all elements, too: the signs are hashed, not alternating). Sums are taken in float32, those of chunks in float64.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dpscope.flash.kernels.kept_gradients import row_norms_squared
from dpscope.flash.kernels.sample_chunks import add_sums_of_chunks
from dpscope.flash.kernels.tensor_lists import chunk_size, find_tensor, pointer_at, size_at
from dpscope.flash.kernels.triton_runtime import Backend, jit, tl
from dpscope.flash.torch_side.captures import device_cache

_STRIDE = 32 * 40_503
"""Between the numbers of the first elements of two tensors: their signs are others."""


def projections(values: Sequence[Tensor], numbers: Sequence[int], *, backend: Backend = "auto") -> Tensor:
    """Return projections and squared norms of tensors (B, …): (2, B) float64. Each tensor's number gives its signs."""
    values = list(map(Tensor.contiguous, values))
    batch = len(values[0])
    starts = [number * _STRIDE for number in numbers]
    total = torch.zeros((2, batch), dtype=torch.float64, device=values[0].device)
    left = add_sums_of_chunks(_projections_kernel, values, starts, total, batch, backend=backend)
    for i in left:
        total[0] += _project(values[i], numbers[i])
        total[1] += row_norms_squared(values[i])
    return total


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
    size = size_at(extents + tensor * 2, ALIGNED)
    number = tl.load(extents + tensor * 2 + 1)
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

"""The noise of a step: element i has the standard normal z_i, a function of the step's key and of i alone.

A key is (seed, offset), drawn once a step (`NoiseSource`); i numbers the elements of all parameters of the optimizer in
their order, each parameter from a multiple of four on (`noise_starts`), elements of a tensor in the order of their
indices. On a GPU z_i is the i mod 4-th normal of the generator's block i // 4 (philox.py): the kernel here, the fused
update's, and torch where they do not serve read the same z_i, to the rounding of ln, sin and cos. On a CPU z_i is
another function of the same key and number (philox.py, too), which processors make faster; `backend="torch"` makes the
kernels' there, too. How parameters are grouped into launches, which of them come at all, and which slice of a parameter
a rank holds does not change z_i. `secure_mode` of Opacus has a noise of its own.

No element may be used twice under one key: two updates that share a noise value reveal it.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import torch
from torch import Tensor

from dpscope.flash.kernels.philox import BLOCK, host_normals, normal_block, normals  # the generators
from dpscope.flash.kernels.tensor_lists import (
    as_word,
    chunk_size,
    find_tensor,
    list_launches,
    noise_starts,
    pointer_at,
    size_at,
)
from dpscope.flash.kernels.triton_runtime import Backend, jit, tl
from dpscope.vocabulary.phases import NOISE_FAMILY, Launch, announce

__all__ = ["HostStream", "add_noise_", "chunks", "normal_block"]

# Elements of noise made at a time, shared between tensors: a call of torch's operators costs 200 µs however few they
# are, and the threads of a CPU want blocks to make.
_WINDOW = 2**18


@torch.no_grad()
def add_noise_(
    tensors: Sequence[Tensor],
    std: float,
    scale: float,
    seed: int,
    offset: int,
    *,
    starts: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> None:
    """Compute g ← (g + std·z)·scale in place for every tensor of the list, without a full-size temporary.

    starts: the number of each tensor's first element; None if the list is complete. torch adds the noise to tensors
    whose first element is not a multiple of four, which shards may have.
    """
    starts = noise_starts(tensors) if starts is None else starts
    launches, left = list_launches([tensors], starts, seed, offset, backend)
    for launch in launches:
        launch.run(_add_noise_kernel, std, scale, DTYPE=launch.dtypes[0])
        announce(partial(_described, tensors, launch.members))
    stream = HostStream(seed, offset, [(starts[i], tensors[i].numel()) for i in left], backend)
    for i in sorted(left, key=starts.__getitem__):
        for part, number in chunks(tensors[i], starts[i]):
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            if std:
                wide.add_(stream.normals(number, part), alpha=std)
            wide.mul_(scale)
            if wide is not part:
                part.copy_(wide)


def _described(tensors: Sequence[Tensor], members: Sequence[int]) -> Launch:
    changed = [tensors[i] for i in members]
    return Launch(name=_add_noise_kernel.__name__, family=NOISE_FAMILY, reads=changed, writes=changed)


# -- Triton ------------------------------------------------------------------------------------------------------------


@partial(jit, do_not_specialize=("n_tensors", "steps"))
def _add_noise_kernel(
    key,
    chunk_starts,
    extents,
    rows,
    n_tensors,
    steps,
    std,
    scale,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, first = find_tensor(tl.program_id(0), chunk_starts, n_tensors, steps, CHUNK)
    size = size_at(extents + tensor * 3, ALIGNED)
    start = tl.load(extents + tensor * 3 + 1)
    values = pointer_at(rows + tensor, DTYPE, ALIGNED)
    seed = tl.load(key)
    offset = tl.load(key + 1)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=0.0).to(tl.float32)
        value = (value + std * normal_block(seed, offset, start + first + at, BLOCK)) * scale
        tl.store(values + index, value.to(DTYPE), mask=index < size)


# -- torch -------------------------------------------------------------------------------------------------------------


def chunks(tensor: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
    """Yield views of `tensor` with the number of their first element; one view if it is not contiguous.

    start: the number of the tensor's first element. Views end at the windows of the stream.
    """
    if not tensor.is_contiguous():
        yield tensor, start
        return
    flat, first = tensor.view(-1), 0
    while first < flat.numel():
        end = first + _WINDOW - (start + first) % _WINDOW
        yield flat[first:end], start + first
        first = end


class HostStream:
    """Stream of standard normals under a key (seed, offset), made a window at a time, in the order of elements.

    spans: (first element, number of elements) of those that will ask. A window continues into the next span if their
    elements are consecutive. On a CPU threads make the noise, unless `backend` asks for that of the kernels.
    """

    def __init__(self, seed: int, offset: int, spans: Sequence[tuple[int, int]], backend: Backend) -> None:
        self.seed, self.offset, self.backend = as_word(seed), as_word(offset), backend
        self.first = 0
        self.window = torch.empty(0)
        self._stretches: list[tuple[int, int]] = []  # (begin, end) of stretches without a gap
        for start, count in sorted(spans):
            goes_on = self._stretches and start - self._stretches[-1][1] < 4
            begin = self._stretches.pop()[0] if goes_on else start
            self._stretches.append((begin, start + count))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor | None:
        """Return as many threads as torch has, if it has several. They end with the stream."""
        count = torch.get_num_threads()
        return ThreadPoolExecutor(count) if count > 1 else None

    def normals(self, start: int, like: Tensor) -> Tensor:
        """Return one float32 normal for each element of `like`. Its first element has the number `start`."""
        if like.is_complex():
            raise ValueError("noise is real: give the real and the imaginary part as tensors of their own")
        count = like.numel()
        inside = self.first <= start and start + count <= self.first + self.window.numel()
        if not inside or self.window.device != like.device:
            _, stretch_end = self._stretches[bisect_right(self._stretches, (start, math.inf)) - 1]
            window_end = start + _WINDOW - start % _WINDOW
            self._make(start, max(start + count, min(window_end, stretch_end)), like.device)
        return self.window[start - self.first :][:count].view(like.shape)

    def _make(self, start: int, end: int, device: torch.device) -> None:
        """Fill the window with the blocks that hold the elements from start to end."""
        of_host = device.type == "cpu" and self.backend == "auto"
        size = BLOCK if of_host else 4
        first, last = start // size, -(-end // size)
        self.first = first * size
        if of_host:
            self.window = host_normals(first, last - first, self.seed, self.offset, self._threads)
        else:
            blocks = torch.arange(first, last, dtype=torch.int64, device=device)
            self.window = normals(blocks, self.seed, self.offset)

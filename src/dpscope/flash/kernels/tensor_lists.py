"""One launch over a list of tensors: a table of pointers, and programs that find their tensor in it.

Each tensor is cut into chunks; chunk_starts[i] is the number of chunks before tensor i, and program n belongs to the
last tensor whose start is at most n. Elements are numbered through the whole list, each tensor starting at a multiple
of four: the number is what the noise stream is indexed by (see philox_noise), so no two elements share a random number.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES, jit, table_on, tl

CHUNK = 16384
"""Elements a program updates."""

BLOCK = 2048
"""Elements it holds in registers at a time."""


def noise_starts(tensors: Sequence[Tensor]) -> list[int]:
    """The number of each tensor's first element in the list's noise stream."""
    return [0, *accumulate(-(-tensor.numel() // 4) * 4 for tensor in tensors)][: len(tensors)]


def as_word(value: int) -> int:
    """An integer modulo 2⁶⁴, as the signed number with those bits."""
    return (value + 2**63) % 2**64 - 2**63


@dataclass(frozen=True)
class ListLaunch:
    """Arguments of one launch over `columns`: lists of equally many contiguous tensors, one dtype a column."""

    tables: list[Tensor]
    programs: int
    steps: int
    dtypes: list[Any]
    cut: dict[str, int]

    @classmethod
    def over(cls, columns: Sequence[Sequence[Tensor]], starts: Sequence[int], seed: int, offset: int) -> ListLaunch:
        """`columns` hold the parameters first, then gradients and state; `starts`: noise_starts of the whole list."""
        chunk_starts = [0, *accumulate(-(-tensor.numel() // CHUNK) for tensor in columns[0])]
        rows: list[int] = []
        for i, tensor in enumerate(columns[0]):
            rows += (tensor.numel(), starts[i])
            rows += (column[i].data_ptr() for column in columns)
        return cls(
            tables=table_on(columns[0][0].device, [as_word(seed), as_word(offset)], chunk_starts, rows),
            programs=chunk_starts[-1],
            steps=len(columns[0]).bit_length(),
            dtypes=[TRITON_DTYPES[column[0].dtype] for column in columns],
            cut={"CHUNK": CHUNK, "BLOCK": BLOCK},
        )


def is_aligned(*tensors: Tensor) -> bool:
    """16-byte loads and stores are possible: `pointer_at` and `size_at` may be told so."""
    return all(tensor.data_ptr() % 16 == 0 and tensor.numel() % 8 == 0 for tensor in tensors)


@jit
def pointer_at(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer out of the table."""
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def size_at(entry, ALIGNED: tl.constexpr):
    """A number of elements out of the table."""
    size = tl.load(entry)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    return size


@jit
def find_tensor(chunk_starts, n_tensors, steps, CHUNK: tl.constexpr):
    """The tensor this program works on, and its first element there."""
    program = tl.program_id(0)
    low = n_tensors * 0
    high = n_tensors
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(chunk_starts + middle) <= program
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low, (program - tl.load(chunk_starts + low)) * CHUNK


@jit
def chunk_size(first, size, CHUNK: tl.constexpr):
    """Elements of this program's chunk: fewer at the end of a tensor."""
    return tl.minimum(size - first, CHUNK).to(tl.int32)

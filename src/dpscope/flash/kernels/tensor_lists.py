"""One launch over a list of tensors: a table of pointers, and programs that find their tensor in it.

Each tensor is cut into chunks; chunk_starts[i] is the number of chunks before tensor i, and program n belongs to the
last tensor whose start is at most n. Elements are numbered, each tensor starting at a multiple of four: the number is
what the noise is indexed by (see noise.py), so no two elements share a random number.

The host's work is a few numbers a tensor: what follows from sizes alone is made once and stays on the device, pointers
travel in one copy.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES, Backend, jit, table_on, tl, use_triton


class Cut(NamedTuple):
    """Elements a program works on, and those it holds in registers at a time."""

    chunk: int
    block: int


# Measured on an H200 over 1.14B parameters (2026-11-15): 7.87 ms for AdamW with noise, against 8.05 with block = 2048.
CUT = Cut(chunk=16384, block=1024)

_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def noise_starts(tensors: Sequence[Tensor], first: int = 0) -> list[int]:
    """The number of each tensor's first element where they are numbered one after the other from `first` on."""
    return [first, *accumulate(map(noise_span, tensors), initial=first)][1 : len(tensors) + 1]


def noise_span(tensor: Tensor) -> int:
    """Numbers that a tensor takes up."""
    return (tensor.numel() + 3) // 4 * 4


def as_word(value: int) -> int:
    """An integer modulo 2⁶⁴, as the signed number with those bits."""
    return (value + 2**63) % 2**64 - 2**63


@dataclass(frozen=True)
class ListLaunch:
    """Arguments of one launch over the tensors `members` of a list.

    arguments: key (seed, offset); chunk_starts; extents (tensors, 2), elements and first element in the noise stream;
    rows (tensors, columns), pointers; the number of tensors, and of steps that find one among them.
    """

    members: list[int]
    device: torch.device
    dtypes: list[Any]
    aligned: bool
    programs: int
    arguments: tuple[Any, ...]
    cut: dict[str, int]


def list_launches(
    columns: Sequence[Sequence[Tensor]],
    starts: Sequence[int],
    seed: int,
    offset: int,
    backend: Backend,
    *,
    stacked: int | None = None,
    cut: Cut | None = None,
) -> tuple[list[ListLaunch], list[int]]:
    """Launches for the tensors the kernels serve, and the indices of the others.

    `columns`: lists of equally many tensors, tensors of one index of equal shape and on one device; the parameters
    first, then gradients and state. `stacked`: the column whose tensors hold such a tensor for every sample, one after
    the other. `starts`: the number of each tensor's first element. Tensors of equal dtypes and alignment share a
    launch. Loops are over whole columns: this runs on the host in every step.
    """
    sizes = _common_sizes(columns, stacked)
    pointers = [list(map(Tensor.data_ptr, column)) for column in columns]
    cut = cut or CUT
    launches: list[ListLaunch] = []
    left: list[int] = []
    for (device, is_aligned, ordered, types), found in _kinds(columns, sizes, pointers, starts).items():
        served = ordered and all(dtype in TRITON_DTYPES for dtype in types)
        if not use_triton(
            backend, device, served=served, why_not=f"dtypes {types}, not contiguous, or cut inside a block of noise"
        ):
            left += found
            continue
        members = found if 0 not in sizes else [i for i in found if sizes[i]]
        if not members:
            continue
        whole = len(members) == len(sizes)
        chunk_starts, extents, programs = _extents(
            tuple(sizes if whole else [sizes[i] for i in members]),
            tuple(starts if whole else [starts[i] for i in members]),
            cut.chunk,
            device,
        )
        chosen = pointers if whole else [[column[i] for i in members] for column in pointers]
        key, rows = table_on(
            device, [as_word(seed), as_word(offset)], list(chain.from_iterable(zip(*chosen, strict=True)))
        )
        launches.append(
            ListLaunch(
                members=members,
                device=device,
                dtypes=[TRITON_DTYPES[dtype] for dtype in types],
                aligned=is_aligned,
                programs=programs,
                arguments=(key, chunk_starts, extents, rows, len(members), len(members).bit_length()),
                cut={"CHUNK": cut.chunk, "BLOCK": cut.block},
            )
        )
    return launches, left


def _common_sizes(columns: Sequence[Sequence[Tensor]], stacked: int | None) -> list[int]:
    """Elements of the tensors of each index; in the column `stacked`, of one sample."""
    samples = 1
    if stacked is not None:
        batches = {tensor.shape[0] for tensor in columns[stacked]}
        if len(batches) > 1:
            raise ValueError(f"expected as many samples in every tensor, got {sorted(batches)}")
        (samples,) = batches
    sizes: list[int] | None = None
    for number, column in enumerate(columns):
        own = list(map(Tensor.numel, column))
        if number == stacked:
            own = [size // samples for size in own] if samples else [tensor.shape[1:].numel() for tensor in column]
        if sizes is None:
            sizes = own
        elif own != sizes:
            if len(own) != len(sizes):
                raise ValueError(
                    f"expected one tensor a parameter in every list, got {[len(each) for each in columns]}"
                )
            i = next(i for i, size in enumerate(sizes) if own[i] != size)
            raise ValueError(f"parameter {i}: shapes differ, {[tuple(each[i].shape) for each in columns]}")
    assert sizes is not None
    return sizes


def _kinds(
    columns: Sequence[Sequence[Tensor]], sizes: list[int], pointers: list[list[int]], starts: Sequence[int]
) -> dict[tuple[Any, ...], list[int]]:
    """The indices by (device, whether 16-byte loads and stores are possible, whether elements lie in order, dtypes).

    A shard of a parameter may begin inside a block of four normals: to the kernels it does not lie in order.
    """
    if all(map(Tensor.is_contiguous, chain(*columns))):
        devices, dtypes_of = set(map(Tensor.get_device, columns[0])), [set(map(_DTYPE, column)) for column in columns]
        if len(devices) == 1 and all(len(types) == 1 for types in dtypes_of):  # as a rule
            types = tuple(next(iter(types)) for types in dtypes_of)
            bits = reduce(or_, chain(*pointers), reduce(or_, sizes) * 2) | reduce(or_, starts) * 4
            if bits % 16 == 0:
                return {(columns[0][0].device, True, True, types): list(range(len(sizes)))}
    whole_blocks = (start % 4 == 0 for start in starts)
    in_order = map(all, zip(whole_blocks, *(map(Tensor.is_contiguous, column) for column in columns), strict=True))
    dtypes = zip(*(map(_DTYPE, column) for column in columns), strict=True)
    low_bits: Iterable[int] = (2 * size for size in sizes)  # eight elements, of two bytes each at least
    for column_pointers in pointers:
        low_bits = map(or_, low_bits, column_pointers)
    aligned = [bits % 16 == 0 for bits in low_bits]  # `pointer_at` and `size_at` may be told so
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, kind in enumerate(zip(map(_DEVICE, columns[0]), aligned, in_order, dtypes, strict=True)):
        kinds.setdefault(kind, []).append(i)
    return kinds


@functools.lru_cache(maxsize=64)
def _extents(
    sizes: tuple[int, ...], starts: tuple[int, ...], chunk: int, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """chunk_starts, (elements, first element in the stream) of each tensor, and the number of chunks."""
    chunk_starts = [0, *accumulate(-(-size // chunk) for size in sizes)]
    first, extents = table_on(
        device, chunk_starts, list(chain.from_iterable(zip(sizes, starts, strict=True))), wait=True
    )
    return first, extents, chunk_starts[-1]


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
def find_tensor(program, chunk_starts, n_tensors, steps, CHUNK: tl.constexpr):
    """The tensor that the list's chunk number `program` is of, and its first element there."""
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

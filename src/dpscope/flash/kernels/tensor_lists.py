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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from operator import attrgetter, or_
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES, Backend, jit, launch, table_on, tl, use_triton
from dpscope.flash.torch_side.captures import device_cache


class Cut(NamedTuple):
    """Elements a program works on, and those it holds in registers at a time."""

    chunk: int
    block: int


# Measured on an H200 over 1.14B parameters (2026-11-15): 7.87 ms for AdamW with noise, against 8.05 with block = 2048.
CUT = Cut(chunk=16384, block=1024)
FINE_CUT = Cut(chunk=2048, block=1024)
"""Of lists that `CUT` leaves with too few programs to fill a GPU."""
ENOUGH_PROGRAMS = 1024

Pointers = list[list[int]]  # columns, of tensors
Kinds = dict[tuple[Any, ...], list[int]]
_Key = TypeVar("_Key")

_SHAPE, _DTYPE, _DEVICE = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")

Seen = tuple[torch.Size, tuple[int, ...], torch.dtype]


def seen_of(tensors: Sequence[Tensor]) -> Iterator[Seen]:
    """Yield shape, strides and dtype of each tensor."""
    return zip(map(_SHAPE, tensors), map(Tensor.stride, tensors), map(_DTYPE, tensors), strict=True)


def alike(keys: Iterable[_Key]) -> dict[_Key, list[int]]:
    """Return the places of each key among the keys."""
    found: defaultdict[_Key, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return found


def noise_starts(tensors: Sequence[Tensor], first: int = 0) -> list[int]:
    """Return the number of each tensor's first element, if elements are numbered consecutively from `first`."""
    return [first, *accumulate(map(noise_span, tensors), initial=first)][1 : len(tensors) + 1]


def noise_span(tensor: Tensor) -> int:
    """Return how many numbers of the noise stream a tensor takes: its elements, rounded up to four."""
    return (tensor.numel() + 3) // 4 * 4


def as_word(value: int) -> int:
    """Return an integer modulo 2⁶⁴ as the signed number with the same bits."""
    return (value + 2**63) % 2**64 - 2**63


def words_of(key: tuple[int, int], numbers: Sequence[float] = ()) -> list[int]:
    """Return a key and the numbers behind it (`number_at`) as int64 words."""
    return [*map(as_word, key), *np.array(numbers, dtype=np.float64).view(np.int64).tolist()]


def read_words(words: Tensor) -> tuple[tuple[int, int], list[float]]:
    """Return key and numbers of a row of words. Wait for the device."""
    seed, offset = words[:2].tolist()
    return (seed, offset), words[2:].view(torch.float64).tolist()


@dataclass(frozen=True)
class ListLaunch:
    """Arguments of one launch over the tensors `members` of a list.

    arguments: key (seed, offset) and numbers; chunk_starts; extents (tensors, 3), elements, first element in the noise
    stream, and which row of factors is the tensor's; rows (tensors, columns), pointers; the number of tensors, and of
    steps that find one among them.
    """

    members: list[int]
    device: torch.device
    dtypes: list[Any]
    aligned: bool
    programs: int
    arguments: tuple[Any, ...]
    cut: Cut

    def run(self, kernel: Any, *more: Any, each: int = 1, **constants: Any) -> None:
        """Launch `each` programs a chunk. `more`: what the kernel takes behind this list's arguments."""
        constants |= {"ALIGNED": self.aligned, "CHUNK": self.cut.chunk, "BLOCK": self.cut.block}
        constants |= {"num_warps": 8, "num_stages": 3}
        launch(kernel, self.programs * each, (*self.arguments, *more), constants, specialised=True)


def list_launches(
    columns: Sequence[Sequence[Tensor]],
    starts: Sequence[int],
    seed: int,
    offset: int,
    backend: Backend,
    *,
    numbers: Sequence[float] = (),
    row: Tensor | None = None,
    stacked: int | None = None,
    samples: int = 1,
    factor_rows: Sequence[int] = (),
    cut: Cut | None = None,
) -> tuple[list[ListLaunch], list[int]]:
    """Return launches for the tensors that the kernels serve, and the indices of the others.

    `columns`: lists of equal length. Tensors of one index have the same shape and device. Parameters come first, then
    gradients and state. `stacked`: the column with one such tensor for each of `samples`, one after the other.
    `starts`: the number of each tensor's first element. `factor_rows`: the row of each one's factors; by default, 0.
    Tensors of equal dtypes and alignment share a launch. Loops run over whole columns, because this runs on the host in
    every step. `numbers`: what the kernel reads behind the key. `row`: `words_of` key and numbers on the device, which
    the host fills later; a CUDA graph reads them from there.
    """
    sizes, pointers, kinds = _read(columns, starts, stacked, samples)
    waiting: list[tuple[Any, ...]] = []  # kind, members, extents, pointers
    left: list[int] = []
    for kind, found in kinds.items():
        device, _, ordered, types = kind
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
        of_each = (sizes, starts, factor_rows or [0] * len(sizes))
        chosen = of_each if whole else [[column[i] for i in members] for column in of_each]
        own = pointers if whole else [[column[i] for i in members] for column in pointers]
        extents = _extents(cut, device, *map(tuple, chosen))
        waiting.append((kind, members, extents, list(chain.from_iterable(zip(*own, strict=True)))))
    launches: list[ListLaunch] = []
    for here in dict.fromkeys(kind[0] for kind, *_ in waiting):
        there = [each for each in waiting if each[0][0] == here]
        key, *tables = table_on(here, words_of((seed, offset), numbers), *(table for *_, table in there))
        key = key if row is None else row
        for ((_, is_aligned, _, types), members, extents, _), table in zip(there, tables, strict=True):
            chunk_starts, of_each, programs, of_launch = extents
            launches.append(
                ListLaunch(
                    members=members,
                    device=here,
                    dtypes=[TRITON_DTYPES[dtype] for dtype in types],
                    aligned=is_aligned,
                    programs=programs,
                    arguments=(key, chunk_starts, of_each, table, len(members), len(members).bit_length()),
                    cut=of_launch,
                )
            )
    return launches, left


def _read(
    columns: Sequence[Sequence[Tensor]], starts: Sequence[int], stacked: int | None, samples: int
) -> tuple[list[int], Pointers, Kinds]:
    """Return sizes of the tensors of each index (in the column `stacked`, of one sample), their pointers, and kinds.

    It goes column by column, so that a tensor is read while it is in the cache.
    """
    if any(len(column) != len(columns[0]) for column in columns):
        raise ValueError(f"expected one tensor a parameter in every list, got {[len(each) for each in columns]}")
    pointers: Pointers = []
    elements: list[list[int]] = []
    dtypes: list[set[torch.dtype]] = []
    in_order = True
    for column in columns:
        pointers.append(list(map(Tensor.data_ptr, column)))
        elements.append(list(map(Tensor.numel, column)))
        dtypes.append(set(map(_DTYPE, column)))
        in_order = in_order and all(map(Tensor.is_contiguous, column))
    sizes = elements[0]
    if stacked == 0:
        found = {tensor.shape[0] for tensor in columns[0]}
        if found - {samples}:
            raise ValueError(f"expected as many samples, {samples}, in every tensor, got {sorted(found)}")
        sizes = [n // samples for n in sizes] if samples else [tensor.shape[1:].numel() for tensor in columns[0]]
    of_samples = [size * samples for size in sizes]
    if any(found != (of_samples if number == stacked else sizes) for number, found in enumerate(elements)):
        raise ValueError(f"shapes differ in {[[tuple(each.shape) for each in column] for column in columns]}")
    # Eight elements, of two bytes each at least: `pointer_at` and `size_at` may be told so.
    all_aligned = (reduce(or_, chain(*pointers)) | 2 * reduce(or_, sizes)) % 16 == 0
    alike = len(set(map(Tensor.get_device, columns[0]))) == 1 and all(len(types) == 1 for types in dtypes)
    if all_aligned and alike and in_order and reduce(or_, starts) % 4 == 0:  # as a rule
        types = tuple(next(iter(types)) for types in dtypes)
        return sizes, pointers, {(columns[0][0].device, True, True, types): list(range(len(sizes)))}
    bits = [2 * size for size in sizes]
    for own in pointers:
        bits = list(map(or_, bits, own))
    return sizes, pointers, _kinds(columns, [each % 16 == 0 for each in bits], starts)


def _kinds(columns: Sequence[Sequence[Tensor]], aligned: list[bool], starts: Sequence[int]) -> Kinds:
    """Group the indices by (device, 16-byte loads and stores are possible, elements are in order, dtypes).

    A shard of a parameter may begin inside a block of four normals. The kernels treat it as not in order.
    """
    whole_blocks = [start % 4 == 0 for start in starts]
    in_order = map(all, zip(whole_blocks, *(map(Tensor.is_contiguous, column) for column in columns), strict=True))
    dtypes = zip(*(map(_DTYPE, column) for column in columns), strict=True)
    return alike(zip(map(_DEVICE, columns[0]), aligned, in_order, dtypes, strict=True))


@device_cache(64)
def _extents(
    cut: Cut | None,
    device: torch.device,
    sizes: tuple[int, ...],
    starts: tuple[int, ...],
    factor_rows: tuple[int, ...],
) -> tuple[Tensor, Tensor, int, Cut]:
    """Return chunk_starts, extents, the number of chunks, and the cut."""
    if cut is None:
        cut = CUT if sum(sizes) >= ENOUGH_PROGRAMS * CUT.chunk else FINE_CUT
    chunk_starts = [0, *accumulate(-(-size // cut.chunk) for size in sizes)]
    first, extents = table_on(
        device, chunk_starts, list(chain.from_iterable(zip(sizes, starts, factor_rows, strict=True))), wait=True
    )
    return first, extents, chunk_starts[-1], cut


@jit
def number_at(key, place: tl.constexpr):
    """Load a number behind the key, as a float32 argument would be."""
    return tl.load(key + 2 + place).to(tl.float64, bitcast=True).to(tl.float32)


@jit
def pointer_at(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a pointer from the table."""
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def size_at(entry, ALIGNED: tl.constexpr):
    """Load a number of elements from the table."""
    size = tl.load(entry)
    if ALIGNED:
        size = tl.multiple_of(size, 8)
    return size


@jit
def find_tensor(program, chunk_starts, n_tensors, steps, CHUNK: tl.constexpr):
    """Find the tensor of the list's chunk number `program`, and its first element there."""
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
    """Return the elements of this program's chunk: fewer at the end of a tensor."""
    return tl.minimum(size - first, CHUNK).to(tl.int32)

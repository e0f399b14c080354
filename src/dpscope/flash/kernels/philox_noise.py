"""The noise: one counter-based stream of standard normals, the same from every kernel, from torch, and on every device.

Philox 4×32-10 with key = seed (64 bits) and counter = (element // 4: 64 bits, offset: 64 bits) gives four 32-bit words
w0…w3 for four neighbouring elements. Its own two words get the offset once more (w2, w3 ← w2, w3 ⊕ offset), and
Box-Muller makes the words normal:

    u = (w0 + ½)·2⁻³²,  r = √(-2 ln u),  θ = 2π·w1·2⁻³²:   z0 = r cos θ,  z1 = r sin θ;  z2, z3 from w2, w3 alike.

`element` runs through a whole list of tensors (tensor_lists.noise_starts). No two calls may share (seed, offset),
however many elements they have: then no counter is ever used twice. Given both, the values are reproducible; between
devices they agree to the rounding of ln, sin and cos.

Seed and offset together are 128 bits of secret. Philox under one key is a permutation that anyone can run backwards:
without the ⊕, four known words and a guess of the 64-bit seed would give the offset, a search among 2⁶⁴. With it a
guess of the seed tells nothing until the offset is guessed too: a search among 2¹²⁸.

What it is not: Philox passes the statistical tests in use (BigCrush) but is no cryptographic generator, and the normals
end at |z| = √(2·33·ln 2) = 6.8. Both hold for the generators deep-learning frameworks use by default.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dpscope.flash.kernels.tensor_lists import (
    as_word,
    chunk_size,
    find_tensor,
    list_launches,
    noise_starts,
    pointer_at,
    size_at,
)
from dpscope.flash.kernels.triton_runtime import Backend, jit, launch_on, tl
from dpscope.vocabulary.families import NOISE
from dpscope.vocabulary.launches import Launch, announce

_WORD = 2**32 - 1
# Elements of noise torch makes at a time: the words stay in cache. 13 ns an element on one core of an AMD EPYC
# (2026-11-15), 17 ns with 2¹⁶; shared between tensors, because a call costs 200 µs however few they are.
_WINDOW = 2**17


def philox_normal(
    shape: Sequence[int],
    seed: int,
    offset: int,
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Elements first, first+1, … of the stream (seed, offset) as a float32 tensor. `first` is a multiple of four."""
    if first % 4:
        raise ValueError(f"first must be a multiple of four, got {first}")
    values = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
    _add([values], [first], 1.0, 1.0, seed, offset, backend)
    return values


def add_noise_(
    tensors: Sequence[Tensor],
    std: float,
    scale: float,
    seed: int,
    offset: int,
    *,
    backend: Backend = "auto",
) -> None:
    """g ← (g + std·z)·scale in place for every tensor of the list, without a full-size temporary."""
    _add(tensors, noise_starts(tensors), std, scale, seed, offset, backend)


@torch.no_grad()
def _add(
    tensors: Sequence[Tensor],
    starts: Sequence[int],
    std: float,
    scale: float,
    seed: int,
    offset: int,
    backend: Backend,
) -> None:
    launches, left = list_launches([tensors], starts, seed, offset, backend)
    for launch in launches:
        with launch_on(launch.device):
            _add_noise_kernel[(launch.programs,)](
                *launch.arguments,
                std,
                scale,
                DTYPE=launch.dtypes[0],
                ALIGNED=launch.aligned,
                **launch.cut,
                num_warps=8,
            )
        announce(partial(_described, tensors, launch.members))
    stream = HostStream(seed, offset, starts[-1] + tensors[-1].numel() if left else 0)
    for i in left:
        for part, first in chunks(tensors[i]):
            wide = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            if std:
                wide.add_(stream.normals(starts[i] + first, part), alpha=std)
            part.copy_(wide.mul_(scale))


def _described(tensors: Sequence[Tensor], members: Sequence[int]) -> Launch:
    changed = [tensors[i] for i in members]
    return Launch(name=_add_noise_kernel.__name__, family=NOISE, reads=changed, writes=changed)


# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def normal_block(seed, offset, element, SIZE: tl.constexpr):
    """SIZE normals for elements [element, element + SIZE); element is a multiple of four, seed and offset int64."""
    block = element // 4 + tl.arange(0, SIZE // 4).to(tl.int64)
    low = block.to(tl.uint32)
    offset_low = low * 0 + offset.to(tl.uint32)
    offset_high = low * 0 + (offset >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, (block >> 32).to(tl.uint32), offset_low, offset_high)
    z0, z1 = _box_muller(w0, w1)
    z2, z3 = _box_muller(w2 ^ offset_low, w3 ^ offset_high)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@jit
def _box_muller(a, b):
    radius = tl.sqrt(-2.0 * tl.log((a.to(tl.float32) + 0.5) * 2.3283064365386963e-10))
    angle = b.to(tl.float32) * 1.4629180792671596e-09  # 2π·2⁻³²
    return radius * tl.cos(angle), radius * tl.sin(angle)


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
    size = size_at(extents + tensor * 2, ALIGNED)
    start = tl.load(extents + tensor * 2 + 1)
    values = pointer_at(rows + tensor, DTYPE, ALIGNED)
    seed = tl.load(key)
    offset = tl.load(key + 1)
    for at in range(0, chunk_size(first, size, CHUNK), BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < size, other=0.0).to(tl.float32)
        value = (value + std * normal_block(seed, offset, start + first + at, BLOCK)) * scale
        tl.store(values + index, value.to(DTYPE), mask=index < size)


# -- torch -------------------------------------------------------------------------------------------------------------


def chunks(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Views of `tensor` with the number of their first element; one view if its elements do not lie in order."""
    if not tensor.is_contiguous():
        yield tensor, 0
        return
    flat = tensor.view(-1)
    for first in range(0, flat.numel(), _WINDOW):
        yield flat[first : first + _WINDOW], first


class HostStream:
    """Elements [0, end) of the stream (seed, offset), made a window at a time for tensors that ask in their order."""

    def __init__(self, seed: int, offset: int, end: int) -> None:
        self.seed, self.offset = as_word(seed), as_word(offset)
        self.end = end
        self.first = 0
        self.window = torch.empty(0)

    def normals(self, start: int, like: Tensor) -> Tensor:
        """One float32 normal for each element of `like`, the first of which has the number `start`."""
        if like.is_complex():
            raise ValueError("noise is real: give the real and the imaginary part as tensors of their own")
        count = like.numel()
        inside = self.first <= start and start + count <= self.first + self.window.numel()
        if not inside or self.window.device != like.device:
            self.first = start
            size = max(count, min(_WINDOW, self.end - start))
            block = torch.arange(start // 4, start // 4 + -(-size // 4), dtype=torch.int64, device=like.device)
            self.window = _normals(block, self.seed, self.offset)
        return self.window[start - self.first :][:count].view(like.shape)


def _normals(block: Tensor, seed: int, offset: int) -> Tensor:
    """The four normals of each block, in order, float32."""
    w0, w1, w2, w3 = _philox(block, seed, offset)
    w2, w3 = w2 ^ (offset & _WORD), w3 ^ ((offset >> 32) & _WORD)
    return torch.stack([*_box_muller_torch(w0, w1), *_box_muller_torch(w2, w3)], dim=1).view(-1)


def _philox(block: Tensor, seed: int, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on 32-bit words held in int64; a product's high word survives the wrap-around of int64."""
    c0, c1 = block & _WORD, (block >> 32) & _WORD
    c2, c3 = torch.full_like(block, offset & _WORD), torch.full_like(block, (offset >> 32) & _WORD)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        right, left = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        torch.bitwise_right_shift(left, 32, out=c0).bitwise_and_(_WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        torch.bitwise_right_shift(right, 32, out=c2).bitwise_and_(_WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = left.bitwise_and_(_WORD), right.bitwise_and_(_WORD)
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _box_muller_torch(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    radius = ((a.float() + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = b.float() * (2.0 * math.pi * 2.0**-32)
    return radius * angle.cos(), radius * angle.sin()

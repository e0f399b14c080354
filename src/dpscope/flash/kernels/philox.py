"""Philox and Box-Muller: standard normals out of a key and a block's number. One generator for kernels, one for CPUs.

**Kernels**: Philox 4×32-10. Key = seed (64 bits) and counter = (block: 64 bits, offset: 64 bits) give four 32-bit words
w0…w3. Its own two words get the offset once more (w2, w3 ← w2, w3 ⊕ offset), and Box-Muller makes the words normal:

    u = (w0 + ½)·2⁻³²,  r = √(-2 ln u),  θ = 2π·w1·2⁻³²:   z0 = r cos θ,  z1 = r sin θ;  z2, z3 from w2, w3 alike.

In Triton (`normal_block`) and in torch on any device (`normals`) it is the same to the rounding of ln, sin and cos.

Seed and offset together are 128 bits of secret. Philox under one key is a permutation that anyone can run backwards:
without the ⊕, four known words and a guess of the 64-bit seed would give the offset, a search among 2⁶⁴. With it a
guess of the seed tells nothing until the offset is guessed too: a search among 2¹²⁸.

**CPUs** (`host_normals`): Philox 4×64-10 (numpy's), block by block in as many threads as torch uses. The key (seed,
offset) is its 128-bit key, so that known words leave a search among 2¹²⁸ keys, and the block's number gives its
counter. A block's words are BLOCK numbers of 32 bits, w₀ those of the first half and w₁ those of the second:

    r = √(-2 ln((w₀ + ½)·2⁻³²)),  θ = 2π·w₁·2⁻³², w₁ signed:    r cos θ in the first half, r sin θ in the second.

The numbers differ from those of the kernels, whose 32-bit products take a CPU three times as long. Nothing depends on
how many threads there are, or on which part of the stream is asked for. Written in numpy, because torch would start
threads of its own in each of these. On one core of an AMD EPYC 3.8 ns an element, where torch's `normal_` takes 3.4
(2026-11-16).

What they are not: Philox passes the statistical tests in use (BigCrush) but is no cryptographic generator, and the
normals end at |z| = √(2·33·ln 2) = 6.8. Both hold for the generators deep-learning frameworks use by default.
"""

# Kernels are typed by Triton, not by Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from concurrent.futures import Executor
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import jit, tl

_WORD = 2**32 - 1

# -- Triton ------------------------------------------------------------------------------------------------------------


@jit
def normal_block(seed, offset, element, SIZE: tl.constexpr):
    """Draw normals for elements [element, element + SIZE); element is a multiple of four, seed and offset are int64."""
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


# -- torch -------------------------------------------------------------------------------------------------------------


def normals(block: Tensor, seed: int, offset: int) -> Tensor:
    """Return the four normals of each block, in order, float32."""
    w0, w1, w2, w3 = _philox(block, seed, offset)
    w2, w3 = w2 ^ (offset & _WORD), w3 ^ ((offset >> 32) & _WORD)
    return torch.stack([*_box_muller_torch(w0, w1), *_box_muller_torch(w2, w3)], dim=1).view(-1)


def _philox(block: Tensor, seed: int, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ten rounds on 32-bit words held in int64; a product's high word survives the wrap-around of int64."""
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


# -- CPUs --------------------------------------------------------------------------------------------------------------


BLOCK = 2**16
"""Elements: what a thread makes at a time, and stays in cache."""

_HALF = BLOCK // 2
_COUNTS = BLOCK // 8  # of Philox's counter a block: four words of 64 bits are eight normals


def host_normals(first: int, count: int, seed: int, offset: int, pool: Executor | None) -> Tensor:
    """Return the normals of blocks first, first + 1, …: (count · BLOCK,) float32. `pool` serves more than one block."""
    values = np.empty((count, BLOCK), dtype=np.float32)
    fill = partial(_fill, np.array([seed % 2**64, offset % 2**64], dtype=np.uint64))
    list((map if pool is None or count == 1 else pool.map)(fill, range(first, first + count), values))
    return torch.from_numpy(values).view(-1)


def _fill(key: npt.NDArray[np.uint64], block: int, out: npt.NDArray[np.float32]) -> None:
    generator = np.random.Generator(np.random.Philox(key=key, counter=block * _COUNTS))
    # `integers` lets other threads run meanwhile, where `random_raw` does not.
    words = generator.integers(0, 2**64 - 1, _HALF, dtype="<u8", endpoint=True)
    cosines, sines = out[:_HALF], out[_HALF:]
    radius = words.view("<u4")[:_HALF].astype(np.float32)
    radius *= 2.0**-32
    radius += 2.0**-33
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    sines[:] = words.view("<i4")[_HALF:]
    sines *= 2.0 * math.pi * 2.0**-32
    np.cos(sines, out=cosines)
    np.sin(sines, out=sines)
    out.reshape(2, _HALF)[:] *= radius

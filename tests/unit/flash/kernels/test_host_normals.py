"""host_normals: Philox 4×64-10 and Box-Muller, the same whatever is asked for and by however many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels.philox import BLOCK, host_normals

KEY = (2**63 + 11, -5)


def made(first: int, count: int, key: tuple[int, int] = KEY, threads: int = 1) -> Tensor:
    with ThreadPoolExecutor(threads) as pool:
        return host_normals(first, count, *key, pool)


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Four 64-bit words by the definition (Salmon et al. 2011), in Python's integers."""
    mask = 2**64 - 1
    c = [counter >> shift & mask for shift in (0, 64, 128, 192)]
    k = [word & mask for word in key]
    for _ in range(10):
        left, right = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(right >> 64) ^ c[1] ^ k[0], right & mask, (left >> 64) ^ c[3] ^ k[1], left & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_the_oracle_is_philox_4x64_10() -> None:
    """A known answer published with Random123."""
    assert philox(0, (0, 0)) == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


@pytest.mark.parametrize("block", [0, 3, 2**40])
def test_normals_are_those_of_the_definition(block: int) -> None:
    counters = range(block * BLOCK // 8 + 1, (block + 1) * BLOCK // 8 + 1)  # numpy counts up before it draws
    words = np.array([word for counter in counters for word in philox(counter, KEY)], dtype=np.uint64).view(np.uint32)
    w, v = np.split(words, 2)
    radius = np.sqrt(-2.0 * np.log((w + 0.5) * 2.0**-32))
    angle = 2.0 * np.pi * v.view(np.int32) * 2.0**-32
    expected = torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]))
    error = (made(block, 1).double() - expected).abs()
    assert error.max() < 4e-4  # (w₀ + ½)·2⁻³² is rounded to 2⁻²⁵: √(2·2⁻²⁵) where it is next to one
    assert error.mean() < 1e-6


def test_a_block_does_not_depend_on_the_others_nor_on_threads() -> None:
    whole = made(7, 4, threads=3)
    assert torch.equal(whole, made(7, 4))
    for block in range(4):
        assert torch.equal(whole[block * BLOCK :][:BLOCK], made(7 + block, 1))


def test_every_bit_of_the_key_counts() -> None:
    first = made(0, 1)
    for bit in (0, 31, 32, 63):
        for key in ((KEY[0] ^ 1 << bit, KEY[1]), (KEY[0], KEY[1] ^ 1 << bit)):
            other = made(0, 1, key)
            assert abs(float((first * other).mean())) < 5 / BLOCK**0.5

"""noise_values and add_noise_: standard normals, reproducible, never reused."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels import noise, philox
from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.kernels.tensor_lists import noise_starts
from dpscope.flash.kernels.triton_runtime import INTERPRETED
from tests.unit.flash.kernels.noise_values import noise_values

N = 2**15
KERNELS = "triton" if INTERPRETED else "torch"


@pytest.fixture(params=["auto", KERNELS])
def backend(request: pytest.FixtureRequest) -> str:
    """The noise of a CPU, and that of the kernels."""
    return request.param


@cache  # it takes seconds in the interpreter, and nobody changes it
def sample(backend: str, seed: int = 7, offset: int = 3, first: int = 0) -> Tensor:
    return noise_values((N,), seed, offset, first=first, backend=backend).double()


def test_the_generator_is_philox_4x32_10() -> None:
    """Known answers published with Random123 (Salmon et al. 2011)."""
    zeros = philox._philox(torch.tensor([0]), 0, 0)
    assert [int(word) for word in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox._philox(torch.tensor([-1]), -1, -1)
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("backend", [KERNELS])  # a CPU has a stream of its own
@pytest.mark.parametrize(("seed", "offset", "first"), [(0, 0, 0), (2**63 + 5, 7, 4), (-3, 2**40 + 1, 2**36)])
def test_kernels_and_torch_give_the_same_stream(seed: int, offset: int, first: int, backend: str) -> None:
    """Up to the rounding of ln, sin and cos: a few units in the last place of values up to seven."""
    got = noise_values((5001,), seed, offset, first=first, backend=backend)
    expected = noise_values((5001,), seed, offset, first=first, backend="torch")
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


def test_the_stream_continues_where_first_says(backend: str) -> None:
    whole = noise_values((9000,), 1, 2, backend=backend)
    part = noise_values((900,), 1, 2, first=8000, backend=backend)
    assert torch.equal(whole[8000:8900], part)


def test_moments_are_those_of_a_standard_normal(backend: str) -> None:
    """n = 2¹⁵: mean, variance, skewness and excess kurtosis within five of their standard errors."""
    z = sample(backend)
    for moment, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**moment).mean() - expected) < 5 * math.sqrt(variance / N)


def test_the_distribution_is_normal(backend: str) -> None:
    """Kolmogorov-Smirnov distance under 1.95/√n, its 0.1% point."""
    uniform = torch.special.ndtr(sample(backend).sort().values)
    ranks = torch.arange(1, N + 1, dtype=torch.float64)
    distance = torch.maximum((ranks / N - uniform).max(), (uniform - (ranks - 1) / N).max())
    assert distance < 1.95 / math.sqrt(N)


@pytest.mark.parametrize(
    "other", [{"seed": 8, "offset": 3}, {"seed": 7, "offset": 4}, {"seed": 7, "offset": 3, "first": N}]
)
def test_other_seeds_steps_and_elements_are_independent(other: dict[str, int], backend: str) -> None:
    """Correlation of n = 2¹⁵ pairs, and of their squares, within five standard errors of zero."""
    z, y = sample(backend), sample(backend, **other)
    assert abs((z * y).mean()) < 5 / math.sqrt(N)
    assert abs(((z**2 - 1) * (y**2 - 1)).mean()) < 5 * 2 / math.sqrt(N)


def test_neighbouring_elements_are_uncorrelated(backend: str) -> None:
    z = sample(backend)
    for lag in (1, 2, 3, 4):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / math.sqrt(N - lag)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_noise_draws_from_one_stream_for_the_whole_list(dtype: torch.dtype, backend: str) -> None:
    """(g + std·z)·scale, each tensor with its own stretch of the stream; sizes that cross chunks and are ragged."""
    shapes = [(3, 5), (20000,), (1,), (7, 9), (14000,)]
    before = [torch.randn(shape).to(dtype) for shape in shapes]
    after = [tensor.clone() for tensor in before]
    add_noise_(after, 2.0, 0.25, 9, 4, backend=backend)
    for old, new, first in zip(before, after, noise_starts(before), strict=True):
        z = noise_values(old.shape, 9, 4, first=first, backend="auto" if backend == "auto" else "torch")
        expected = ((old.float() + 2.0 * z) * 0.25).to(dtype)
        tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5  # one rounding, or the interpreter's truncation
        torch.testing.assert_close(new, expected, rtol=tolerance, atol=1e-5)


def test_add_noise_to_tensors_that_are_not_contiguous() -> None:
    g = torch.randn(6, 5).T
    expected = g + noise_values(g.shape, 1, 1)
    add_noise_([g], 1.0, 1.0, 1, 1)
    torch.testing.assert_close(g, expected)


def test_tensors_of_one_list_never_share_an_element() -> None:
    tensors = [torch.zeros(5), torch.zeros(0), torch.zeros(4), torch.zeros(1)]
    assert noise_starts(tensors) == [0, 8, 8, 12]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2], [3, 0]])
@pytest.mark.parametrize("window", [4, 2**18])
def test_a_part_of_the_parameters_in_any_order_gets_its_own_noise(
    order: list[int], window: int, backend: str, monkeypatch
) -> None:
    monkeypatch.setattr(noise, "_WINDOW", window)
    whole = [torch.zeros(shape) for shape in [(3, 5), (301,), (1,), (7, 9)]]
    starts = noise_starts(whole)
    add_noise_(whole, 1.0, 1.0, 9, 4, backend=backend)
    some = [torch.zeros_like(whole[i]) for i in order]
    add_noise_(some, 1.0, 1.0, 9, 4, starts=[starts[i] for i in order], backend=backend)
    for i, tensor in zip(order, some, strict=True):
        assert torch.equal(tensor, whole[i])


@pytest.mark.parametrize("start", [8, 2**16 - 6, 2**18 - 1, 2**18 + 2**16 + 3])
def test_a_shard_gets_the_noise_of_its_elements(start: int) -> None:
    """Wherever it begins, in a block of the stream or between windows of it."""
    whole = noise_values((2**19,), 9, 4)
    shard = torch.zeros(40_000)
    add_noise_([shard], 1.0, 1.0, 9, 4, starts=[start])
    assert torch.equal(shard, whole[start : start + 40_000])


def test_the_noise_of_a_cpu_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that follow one another share windows, and no block is made for two of them."""
    asked: list[int] = []

    def counted(first: int, count: int, *rest: object) -> Tensor:
        asked.extend(range(first, first + count))
        return torch.zeros(count * noise.BLOCK)

    monkeypatch.setattr(noise, "host_normals", counted)
    add_noise_([torch.zeros(n) for n in (1000, 500_001, 7, 70_000)], 1.0, 1.0, 9, 4)
    assert asked == list(range(len(asked)))
    assert len(asked) == -(-571_012 // noise.BLOCK)

"""The compiled kernels over kept per-sample gradients, at realistic sizes, against the references of the unit tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.kept_gradients import kept_norms_squared, kept_sums
from tests.unit.flash.kernels import kernel_references as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Aligned and not, below and above a chunk, a scalar.
SHAPES = [(1000, 513), (64,), (7,), (40_000,), (), (2048, 2048)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def stored(batch: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(batch, *shape, device="cuda", dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 9])
def test_norms_and_sums(batch: int, dtype: torch.dtype) -> None:
    values, factors = stored(batch, dtype), torch.rand(batch, device="cuda", dtype=torch.float64)
    norms = kept_norms_squared(values, backend="triton")
    torch.testing.assert_close(norms, reference.kept_norms_squared(values), rtol=2e-6, atol=0)
    for got, v in zip(kept_sums(values, factors, backend="triton"), values, strict=True):
        torch.testing.assert_close(got, reference.kept_sum(v, factors).float(), rtol=1e-5, atol=2e-6)


def test_indices_beyond_32_bits() -> None:
    values = torch.ones(3, 2**30, device="cuda", dtype=torch.bfloat16)
    values[2, -1] = 3.0
    factors = torch.tensor([1.0, 2.0, 4.0], device="cuda")
    assert kept_norms_squared([values], backend="triton").tolist() == [2.0**30, 2.0**30, 2.0**30 + 8]
    (total,) = kept_sums([values], factors, backend="triton")
    assert (total[0].item(), total[-1].item()) == (7.0, 15.0)
    assert (total[:-1] == 7.0).all()


def test_more_samples_than_a_grid_has_rows() -> None:
    values, factors = torch.randn(70_000, 5, device="cuda"), torch.rand(70_000, device="cuda")
    norms = kept_norms_squared([values], backend="triton")
    torch.testing.assert_close(norms, values.double().square().sum(1), rtol=2e-6, atol=0)
    (total,) = kept_sums([values], factors, backend="triton")
    torch.testing.assert_close(total.double(), values.double().T @ factors.double(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_hold_for_every_finite_value_and_nan_is_found(dtype: torch.dtype) -> None:
    """Subnormal numbers, and numbers whose squares overflow, in one sample each; zeros; one NaN, one inf."""
    sizes = [1e-44 if dtype == torch.float32 else 1e-39, 1e-30, 1e-19, 1.0, 1e19, 3e38, 0.0, 1.0, 1.0]
    sample_sizes = torch.tensor(sizes, device="cuda", dtype=torch.float64).unsqueeze(1)
    signs = [(torch.rand(len(sizes), n, device="cuda", dtype=torch.float64) - 0.5).sign() for n in (100_003, 16)]
    values = [(sign * sample_sizes).to(dtype) for sign in signs]
    values[0][7, 100_002] = torch.nan
    values[1][8, 3] = -torch.inf
    got = kept_norms_squared(values, backend="triton")
    expected = reference.kept_norms_squared(values)
    torch.testing.assert_close(got[:7], expected[:7], rtol=2e-6, atol=0)
    assert not got[7:].isfinite().any()


@pytest.mark.parametrize("left_out", [0.0, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["sgd", "adam", "sum", "added"])
def test_one_pass_over_the_samples_is_the_step_on_their_sum(kind: str, dtype: torch.dtype, left_out: float) -> None:
    values = stored(6, dtype)
    factors = torch.tensor([0.3, left_out, 1.0, 0.5, left_out, 2.0], device="cuda", dtype=torch.float64)
    for v in values:
        v[1], v[4] = torch.nan, torch.inf
    sums = [reference.kept_sum(v, factors.nan_to_num()).float() for v in values]
    params = [torch.randn(shape, device="cuda") for shape in SHAPES]
    expected = [param.clone() for param in params]
    common: dict[str, Any] = {"lr": 0.1, "noise_std": 0.7, "grad_scale": 0.25, "seed": 5, "backend": "triton"}
    if kind == "sum":
        params, expected = kept_sums(values, factors, backend="triton"), sums
    elif kind == "added":
        expected = [param + s for param, s in zip(params, sums, strict=True)]
        kept_sums(values, factors, outs=params, backend="triton")
    else:
        for targets, given, options in ((expected, sums, {}), (params, values, {"factors": factors})):
            if kind == "sgd":
                fused_sgd_(targets, given, **common, **options)
            else:
                state = [[torch.zeros_like(param) for param in params] for _ in range(2)]
                fused_adam_(targets, given, *state, step=1, eps=0.1, **common, **options)
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=3e-6)


def test_batches_of_any_size_share_two_compiled_updates() -> None:
    """Under Poisson sampling the batch changes from step to step: a compilation for each size would cost seconds."""
    from dpscope.flash.kernels.fused_update import _sgd_kernel

    def step(batch: int) -> int:
        params, values = [torch.zeros(64, device="cuda")], [torch.ones(batch, 64, device="cuda")]
        fused_sgd_(params, values, lr=0.1, factors=torch.ones(batch, device="cuda"), backend="triton")
        return sum(len(cache[0]) for cache in _sgd_kernel.device_caches.values())

    step(1)
    several = step(2)
    assert {step(batch) for batch in range(1, 18)} == {several}

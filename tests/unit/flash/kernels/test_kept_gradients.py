"""kept_norms_squared and kept_sums give the norms and clipped sums of per-sample gradients that are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels import triton_runtime
from dpscope.flash.kernels.kept_gradients import kept_norms_apart, kept_norms_squared, kept_sums
from tests.unit.flash.kernels import kernel_references as reference

SHAPES = [(13, 7), (3001,), (), (5,), (4, 3, 2), (16, 24)]

# A chunk's squares are added up in float32: a tree, and few terms a lane before it.
NORM = {"rtol": 2e-6, "atol": 0.0}
# At most ten terms of size one, each rounded to 6e-8.
SUM = {"rtol": 1e-5, "atol": 2e-6}


pytestmark = pytest.mark.usefixtures("small_chunks")


def stored(batch: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(batch, *shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", range(1, 10))
def test_norms_are_of_what_is_stored(batch: int, dtype: torch.dtype, backend: str) -> None:
    values = stored(batch, dtype)
    got = kept_norms_squared(values, backend=backend)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, reference.kept_norms_squared(values), **NORM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_each_tensor_by_itself(dtype: torch.dtype, backend: str) -> None:
    """One has several chunks, one no elements, and one is not finite in a sample."""
    values = [*stored(3, dtype), torch.ones(3, 0)]
    values[3][1] = torch.nan
    backend = "torch" if dtype == torch.float64 else backend
    found = kept_norms_apart(values, backend=backend)
    got = {at: squares for members, rows in found for at, squares in zip(members, rows, strict=True)}
    for at, each in enumerate(values):
        wanted = reference.kept_norms_squared([each])
        torch.testing.assert_close(got.get(at, torch.zeros_like(wanted)), wanted, equal_nan=True, **NORM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_finite_value_has_its_norm(dtype: torch.dtype, backend: str) -> None:
    """One sample has values of 1e-30 beside ones. (The interpreter errs on subnormal bfloat16: none here.)"""
    sizes = [1e-35, 1e-30, 1e-19, 1.0, 1e19, 1e30, 3e38, 0.0]
    values = [torch.randn(len(sizes), n).clamp(-1, 1) * torch.tensor(sizes).unsqueeze(1) for n in (3000, 5)]
    values[1][1] = 1.0  # beside values of 1e-30
    values = [each.to(dtype) for each in values]
    got = kept_norms_squared(values, backend=backend)
    torch.testing.assert_close(got, reference.kept_norms_squared(values), **NORM)
    assert got[-1] == 0.0


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_that_is_not_finite_has_no_finite_norm(dtype: torch.dtype, poison: float, backend: str) -> None:
    values = stored(5, dtype)
    values[1][3, 2999] = poison
    values[2][0] = poison
    got = kept_norms_squared(values, backend=backend)
    assert got.isfinite().tolist() == [False, True, True, False, True]
    assert got[1] == kept_norms_squared([v[1:2] for v in values], backend=backend)[0]


def test_norms_of_float64_are_taken_in_float64() -> None:
    values = [torch.randn(3, 50, dtype=torch.float64) * 1e100, torch.randn(3, 7)]
    torch.testing.assert_close(kept_norms_squared(values), reference.kept_norms_squared(values), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", range(1, 10))
def test_sums_have_each_sample_by_its_factor(batch: int, dtype: torch.dtype, backend: str) -> None:
    values, factors = stored(batch, dtype), torch.rand(batch, dtype=torch.float64)
    for got, v in zip(kept_sums(values, factors, backend=backend), values, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, reference.kept_sum(v, factors).float(), **SUM)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("into", [False, True])
def test_tensors_of_one_launch_have_factors_of_their_own(into: bool, batch: int, backend: str) -> None:
    values, factors, rows = stored(batch), torch.rand(3, batch, dtype=torch.float64), [2, 0, 1, 1, 0, 2]
    outs = [torch.zeros(v.shape[1:]) if into else None for v in values]
    found = kept_sums(values, factors, rows=rows, outs=outs, backend=backend)
    for got, v, row in zip(found, values, rows, strict=True):
        torch.testing.assert_close(got, reference.kept_sum(v, factors[row]).float(), **SUM)


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_sums_are_added_to_what_is_there_in_its_own_dtype(batch: int, backend: str) -> None:
    """Some outputs are given, one of them bfloat16; bfloat16 is rounded to once (the interpreter truncates)."""
    values, factors = stored(batch, torch.bfloat16), torch.rand(batch)
    outs: list[Tensor | None] = [torch.randn(shape) for shape in SHAPES]
    outs[1], outs[3] = torch.randn(3001).bfloat16(), None
    before = [None if out is None else out.clone() for out in outs]
    results = kept_sums(values, factors, outs=outs, backend=backend)
    for got, out, old, v in zip(results, outs, before, values, strict=True):
        assert got is out or out is None
        wanted = reference.kept_sum(v, factors) + (0 if old is None else old.double())
        close = SUM if got.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
        torch.testing.assert_close(got, wanted.to(got.dtype), **close)


@pytest.mark.parametrize("left_out", [0.0, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_without_a_factor_has_no_share_whatever_it_holds(
    dtype: torch.dtype, left_out: float, backend: str
) -> None:
    values = stored(6, dtype)
    expected = [v.clone() for v in values]
    factors = torch.tensor([1.0, left_out, 0.3, 2.0, left_out, 0.5])
    for v, clean in zip(values, expected, strict=True):
        v[1], v[4] = torch.nan, torch.inf
        clean[1] = clean[4] = 0.0
    sums = kept_sums(values, factors, backend=backend)
    for got, clean in zip(sums, expected, strict=True):
        torch.testing.assert_close(got, reference.kept_sum(clean, factors.nan_to_num()).float(), **SUM)


def test_a_batch_of_samples_that_are_all_left_out_sums_to_zero(backend: str) -> None:
    values = [torch.full((3, 40), torch.nan)]
    (got,) = kept_sums(values, torch.zeros(3), backend=backend)
    assert (got == 0).all()


def test_the_gradients_are_left_alone(backend: str) -> None:
    values = stored(3)
    before = [v.clone() for v in values]
    kept_norms_squared(values, backend=backend)
    kept_sums(values, torch.rand(3), backend=backend)
    assert all(torch.equal(v, b) for v, b in zip(values, before, strict=True))


def test_autograd_notices_what_a_sum_is_added_to(backend: str) -> None:
    out = torch.zeros(8)
    version = out._version
    kept_sums([torch.ones(2, 8)], torch.ones(2), outs=[out], backend=backend)
    assert out._version > version


def test_tensors_without_elements_are_passed_over(backend: str) -> None:
    values = [torch.ones(2, 0), torch.ones(2, 9), torch.ones(2, 0, 4)]
    assert kept_norms_squared(values, backend=backend).tolist() == [9.0, 9.0]
    assert [s.shape for s in kept_sums(values, torch.ones(2), backend=backend)] == [(0,), (9,), (0, 4)]


def test_gradients_of_other_layouts(backend: str) -> None:
    values = [torch.randn(7, 3).T, torch.randn(3, 6, 5).transpose(1, 2), torch.randn(1, 4).expand(3, 4)]
    factors = torch.rand(3)
    torch.testing.assert_close(
        kept_norms_squared(values, backend=backend), reference.kept_norms_squared(values), **NORM
    )
    for got, v in zip(kept_sums(values, factors, backend=backend), values, strict=True):
        torch.testing.assert_close(got, reference.kept_sum(v, factors).float(), **SUM)


def test_outputs_of_other_layouts_take_the_fallback() -> None:
    values, factors, out = torch.randn(3, 5, 6), torch.rand(3), torch.randn(6, 5).T
    expected = out + reference.kept_sum(values, factors).float()
    kept_sums([values], factors, outs=[out])
    torch.testing.assert_close(out, expected, **SUM)


def test_a_large_tensor_is_summed_in_pieces_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "CHUNK_BYTES", 4096)
    values, factors = [torch.randn(3, 20_001).bfloat16()], torch.rand(3)
    torch.testing.assert_close(kept_sums(values, factors)[0], reference.kept_sum(values[0], factors).float(), **SUM)


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        kept_norms_squared([])
    with pytest.raises(ValueError, match="as many samples"):
        kept_norms_squared([torch.ones(2, 3), torch.ones(3, 3)])
    for factors in (torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one floating-point factor a sample"):
            kept_sums([torch.ones(2, 4)], factors)
    with pytest.raises(ValueError, match="shapes differ"):
        kept_sums([torch.ones(2, 4)], torch.ones(2), outs=[torch.zeros(3)])

"""rms_norm_gradients gives what autograd gives for the input, and each sample's gradient of the weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpscope.flash.kernels import rms_norm
from dpscope.flash.kernels.rms_norm import rms_norm_gradients
from dpscope.flash.kernels.sample_sums import many_bias_sums

EPS = 1e-3


def operands(batch: int, length: int, width: int, g: torch.dtype, x: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, length, width).to(g),
        torch.randn(batch, length, width).to(x),
        (torch.rand(width) + 0.5).to(x),
    )


def sample_by_sample(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """By autograd in float64, one sample after the other."""
    dxs, dws = [], []
    for of_g, of_x in zip(g.double(), x.double(), strict=True):
        rows, w = of_x.requires_grad_(), weight.double().requires_grad_()
        found = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * w
        dx, dw = torch.autograd.grad(found, (rows, w), of_g)
        dxs.append(dx)
        dws.append(dw)
    return torch.stack(dxs), torch.stack(dws)


def assert_gradients(g: Tensor, x: Tensor, weight: Tensor, backend: str) -> None:
    dx, dw = rms_norm_gradients(g, x, weight, EPS, backend=backend)
    expected_dx, expected_dw = sample_by_sample(g, x, weight)
    assert dx.dtype == x.dtype
    assert dx.is_contiguous()
    # dx is rounded to x's dtype; sums of T terms of size one have errors near sqrt(T)·6e-8.
    rounding = {"rtol": 2 * torch.finfo(x.dtype).eps, "atol": max(1e-5, torch.finfo(x.dtype).eps)}
    torch.testing.assert_close(dx.double(), expected_dx, **rounding)
    torch.testing.assert_close(dw.double(), expected_dw, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "g_dtype", "x_dtype"),
    [
        (1, torch.float32, torch.float32),
        (7, torch.bfloat16, torch.bfloat16),
        (33, torch.bfloat16, torch.float32),
        (130, torch.float32, torch.float16),
    ],
)
def test_gradients(length: int, g_dtype: torch.dtype, x_dtype: torch.dtype, backend: str) -> None:
    assert_gradients(*operands(3, length, 37, g_dtype, x_dtype), backend)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 3), length=st.integers(1, 60), width=st.integers(2, 300))
def test_any_shape(batch: int, length: int, width: int, backend: str) -> None:
    assert_gradients(*operands(batch, length, width, torch.float32, torch.float32), backend)


@pytest.mark.parametrize("programs", [1, 6, 512])
def test_programs_of_any_length(programs: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "PROGRAMS", programs)
    assert_gradients(*operands(2, 150, 8, torch.float32, torch.float32), backend)


def test_non_contiguous_operands(backend: str) -> None:
    g, x = torch.randn(3, 20, 96)[:, :, 5:40], torch.randn(3, 35, 20).transpose(1, 2)
    assert_gradients(g, x, torch.rand(70)[::2] + 0.5, backend)


def test_sums_that_need_not_be_whole_are_added_up_with_those_of_other_layers(backend: str) -> None:
    layers = [operands(2, 60, 8, torch.bfloat16, torch.float32) for _ in range(2)]
    parts = [rms_norm_gradients(*each, EPS, whole=False, backend=backend)[1] for each in layers]
    whole = [rms_norm_gradients(*each, EPS, backend=backend)[1] for each in layers]
    if backend != "torch":
        assert {part.shape for part in parts} == {torch.Size((2, 8, 8))}
        parts = many_bias_sums(parts, backend=backend)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", ["needs_x", "needs_weight"])
def test_only_what_is_needed_is_made(wanted: str, backend: str) -> None:
    call = operands(2, 9, 5, torch.float32, torch.float32)
    both = dict(zip(("needs_x", "needs_weight"), rms_norm_gradients(*call, EPS, backend=backend), strict=True))
    needs = {name: name == wanted for name in both}
    found = dict(zip(both, rms_norm_gradients(*call, EPS, **needs, backend=backend), strict=True))
    assert torch.equal(found.pop(wanted), both[wanted])
    assert list(found.values()) == [None]


def test_a_non_finite_sample_spoils_only_its_own_rows(backend: str) -> None:
    g, x, weight = operands(3, 20, 16, torch.float32, torch.float32)
    x[1, 19] = torch.nan
    dx, dw = rms_norm_gradients(g, x, weight, EPS, backend=backend)
    assert dw[1].isnan().all()
    assert dw[[0, 2]].isfinite().all()
    assert dx[[0, 2]].isfinite().all()


def test_float64_stays_float64() -> None:
    g, x, weight = (each.double() for each in operands(2, 7, 5, torch.float32, torch.float32))
    for got, expected in zip(rms_norm_gradients(g, x, weight, EPS), sample_by_sample(g, x, weight), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        rms_norm_gradients(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.zeros(5), EPS)

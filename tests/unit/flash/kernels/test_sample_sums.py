"""bias_sums and layer_norm_sums give each sample's sums over its positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpscope.flash.kernels import triton_runtime
from dpscope.flash.kernels.sample_sums import bias_sums, layer_norm_sums, many_bias_sums
from tests.unit.flash.kernels import kernel_references as reference


def operands(batch: int, length: int, width: int, g: torch.dtype, x: torch.dtype) -> tuple[Tensor, ...]:
    return (
        torch.randn(batch, length, width).to(g),
        torch.randn(batch, length, width).to(x),
        torch.randn(batch, length),
        torch.rand(batch, length) + 0.5,
    )


def assert_sums(got: Tensor, expected: Tensor) -> None:
    """float32 sums of T terms of size one: errors near sqrt(T)·6e-8, and sums themselves may vanish; hence absolute."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "g_dtype", "x_dtype"),
    [
        (1, torch.float32, torch.float32),
        (7, torch.bfloat16, torch.bfloat16),
        (33, torch.bfloat16, torch.float32),
        (130, torch.float32, torch.float16),
        (300, torch.float16, torch.float16),
    ],
)
def test_sums_over_positions(length: int, g_dtype: torch.dtype, x_dtype: torch.dtype, backend: str) -> None:
    g, x, mean, rstd = operands(3, length, 37, g_dtype, x_dtype)
    expected_gamma, expected_beta = reference.layer_norm_sums(g, x, mean, rstd)
    dgamma, dbeta = layer_norm_sums(g, x, mean, rstd, backend=backend)
    assert_sums(dgamma, expected_gamma)
    assert_sums(dbeta, expected_beta)
    assert_sums(bias_sums(g), expected_beta)


@pytest.mark.parametrize("length", [1, 130])
def test_sums_of_many_biases_are_each_its_own(length: int, backend: str) -> None:
    """Of equal and of different shapes, dtypes, strides and alignments, in the order that they came in."""
    wide = torch.randn(3, length, 64).bfloat16()
    gs = [
        torch.randn(3, length, 300),
        wide[:, :, 8:24],
        wide[:, :, 24:40],
        wide[:, :, 1:17],
        torch.randn(3, length, 300),
    ]
    for got, g in zip(many_bias_sums(gs, backend=backend), gs, strict=True):
        assert_sums(got, g.double().sum(1))
    assert many_bias_sums([]) == []


def test_layer_norm_agrees_with_autograd(backend: str) -> None:
    """mean and rstd are those of torch's own layer norm."""
    x, g = torch.randn(1, 9, 24), torch.randn(1, 9, 24)
    layer = torch.nn.LayerNorm(24)
    layer(x).backward(g)
    _, mean, rstd = torch.native_layer_norm(x, [24], layer.weight, layer.bias, layer.eps)
    dgamma, dbeta = layer_norm_sums(g, x, mean.squeeze(-1), rstd.squeeze(-1), backend=backend)
    torch.testing.assert_close(dgamma[0], layer.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dbeta[0], layer.bias.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "stretches"), [(100, 0), (300, 3), (1100, 0)])
def test_sums_that_need_not_be_whole_are_added_up_with_those_of_other_layers(
    length: int, stretches: int, backend: str
) -> None:
    layers = [operands(2, length, 8, torch.bfloat16, torch.float32) for _ in range(3 if stretches else 1)]
    parts = [sums for each in layers for sums in layer_norm_sums(*each, whole=False, backend=backend)]
    whole = [sums for each in layers for sums in layer_norm_sums(*each, backend=backend)]
    if stretches and backend != "torch":
        assert {part.shape for part in parts} == {torch.Size((2, stretches, 8))}
        parts = many_bias_sums(parts, backend=backend)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_several_blocks_of_features(backend: str) -> None:
    g, x, mean, rstd = operands(2, 5, 700, torch.float32, torch.float32)
    expected, _ = reference.layer_norm_sums(g, x, mean, rstd)
    assert_sums(layer_norm_sums(g, x, mean, rstd, backend=backend)[0], expected)


def test_non_contiguous_operands(backend: str) -> None:
    wide = torch.randn(3, 20, 96)
    g, x = wide[:, :, 5:40], torch.randn(3, 35, 20).transpose(1, 2)
    mean, rstd = torch.randn(20, 3).T, torch.rand(3, 40)[:, ::2]
    expected, _ = reference.layer_norm_sums(g, x, mean, rstd)
    assert_sums(layer_norm_sums(g, x, mean, rstd, backend=backend)[0], expected)


def test_a_non_finite_sample_spoils_only_its_own_row(backend: str) -> None:
    g, x, mean, rstd = operands(3, 140, 16, torch.float32, torch.float32)
    x[1, 139] = torch.nan
    dgamma, dbeta = layer_norm_sums(g, x, mean, rstd, backend=backend)
    assert dgamma[1].isnan().all()
    assert dgamma[[0, 2]].isfinite().all()
    assert dbeta.isfinite().all()


def test_float64_stays_float64() -> None:
    g, x, mean, rstd = (tensor.double() for tensor in operands(2, 7, 5, torch.float32, torch.float32))
    expected, _ = reference.layer_norm_sums(g, x, mean, rstd)
    assert bias_sums(g).dtype == torch.float64
    got, _ = layer_norm_sums(g, x, mean, rstd)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_small_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "CHUNK_BYTES", 1)
    g, x, mean, rstd = operands(2, 11, 6, torch.float32, torch.bfloat16)
    expected, _ = reference.layer_norm_sums(g, x, mean, rstd)
    assert_sums(layer_norm_sums(g, x, mean, rstd, backend="torch")[0], expected)


def test_an_empty_batch_gives_no_rows() -> None:
    g, rstd = torch.zeros(0, 4, 3), torch.zeros(0, 4)
    assert bias_sums(g).shape == (0, 3)
    assert layer_norm_sums(g, g, rstd, rstd)[0].shape == (0, 3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        layer_norm_sums(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="statistics"):
        layer_norm_sums(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 4), torch.zeros(2, 3))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 3), length=st.integers(1, 150), width=st.integers(1, 300))
def test_any_shape(batch: int, length: int, width: int, backend: str) -> None:
    g, x, mean, rstd = operands(batch, length, width, torch.bfloat16, torch.float32)
    expected_gamma, expected_beta = reference.layer_norm_sums(g, x, mean, rstd)
    dgamma, dbeta = layer_norm_sums(g, x, mean, rstd, backend=backend)
    assert_sums(dgamma, expected_gamma)
    assert_sums(dbeta, expected_beta)

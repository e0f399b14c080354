"""Per-sample gradients of convolutions on a GPU: compiled kernels against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from dpscope.flash.kernels.conv_products import (
    ConvProduct,
    Geometry,
    conv_norms,
    conv_products,
    conv_sum,
    conv_sums,
    serves_conv,
)
from tests.unit.flash.kernels.conv_cases import CASES, exact, operands

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Products of float32 in three of TF32; TF32 truncates both operands; bfloat16 rounds values once.
TOLERANCES = {"float32": 2e-6, "tf32": 3e-3, "bfloat16": 4e-3}
LARGE = {"7²": (512, 320, 3, 7), "28², one element": (256, 96, 1, 28), "stem": (3, 64, 7, 57)}


def assert_right(x: torch.Tensor, g: torch.Tensor, geometry: Geometry, shape: tuple[int, ...], kind: str) -> None:
    x, g = (each.to(torch.bfloat16) if kind == "bfloat16" else each for each in (x, g))
    assert serves_conv(x, g, geometry)
    truth = exact(x, g, geometry, shape)
    product = ConvProduct(x, g, geometry, in_tf32=kind == "tf32")
    values, parts = conv_products(product, g.dtype)
    assert values is not None
    assert float((values.view_as(truth).double() - truth).norm() / truth.norm()) < TOLERANCES[kind]
    torch.testing.assert_close(parts.sum(1), values.double().square().sum((1, 2)), rtol=2e-6, atol=0)
    dropped = conv_products(product, None)[1].sum(1)  # in other tiles, and not rounded to bfloat16
    torch.testing.assert_close(dropped, parts.sum(1), rtol=2e-6 if kind != "bfloat16" else 2e-2, atol=0)
    directions = torch.randn(values.shape[1:], device="cuda")
    along = conv_products(product, g.dtype, directions=directions)[1].sum(1)
    rows = values.double()
    expected = torch.stack([rows.square().sum(2), rows.sum(2), (rows * directions.double()).sum(2)], 1)
    torch.testing.assert_close(along, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    if kind != "bfloat16":  # without values nothing is rounded
        along = conv_products(product, None, directions=directions)[1].sum(1)
        torch.testing.assert_close(along, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    scale = torch.rand(len(x), device="cuda")
    scale[0] = 0.0
    x[0] = torch.nan
    total = conv_sum(ConvProduct(x, g, geometry, in_tf32=kind == "tf32"), scale).view(shape).double()
    wanted = torch.einsum("b,b...->...", scale.double(), truth)
    assert float((total - wanted).norm() / wanted.norm()) < TOLERANCES[kind]


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_any_geometry(name: str, kind: str) -> None:
    torch.manual_seed(0)
    assert_right(*operands(name, batch=5, device="cuda"), kind)


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_layers_of_equal_shapes_that_share_launches(name: str, kind: str) -> None:
    torch.manual_seed(0)
    products = []
    for _ in range(3):
        x, g, geometry, _ = operands(name, batch=5, device="cuda")
        x, g = (each.to(torch.bfloat16) if kind == "bfloat16" else each for each in (x, g))
        products.append(ConvProduct(x, g, geometry, in_tf32=kind == "tf32"))
    scale = torch.rand(5, device="cuda")
    for product, parts, total in zip(products, conv_norms(products), conv_sums([*products], scale), strict=True):
        torch.testing.assert_close(parts.sum(1), conv_products(product, None)[1].sum(1), rtol=2e-6, atol=0)
        alone = conv_sum(product, scale)
        torch.testing.assert_close(total, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layers_of_many_tiles(name: str, kind: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    channels, outs, kernel, size = LARGE[name]
    geometry = Geometry((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1), 1)
    x, g = (torch.randn(3, c, size, size, device="cuda").to(memory_format=layout) for c in (channels, outs))
    assert_right(x, g, geometry, (outs, channels, kernel, kernel), kind)


def test_norm_and_sum_are_of_the_same_products_where_positions_cancel() -> None:
    """Positions that cancel up to the rounding of TF32: what is left is rounding, of which norm and sum are alike."""
    torch.manual_seed(0)
    geometry = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
    x = torch.randn(4, 64, 14, 14, device="cuda")
    g = torch.randn(4, 64, 14, 14, device="cuda")
    x[..., 7:], g[..., 7:] = x[..., :7], -g[..., :7] * (1 + 2.0**-12)
    product = ConvProduct(x, g, geometry, in_tf32=True)
    norms = conv_products(product, None)[1].sum(1).sqrt()
    for b in range(4):
        scale = torch.zeros(4, device="cuda")
        scale[b] = 1 / norms[b]
        assert float(conv_sum(product, scale).double().norm()) == pytest.approx(1.0, rel=1e-3)

"""Norms of convolutions' per-sample gradients by Gram matrices without patches."""

from __future__ import annotations

import pytest
import torch

from dpscope.flash.kernels import conv_gram as module
from dpscope.flash.kernels.conv_gram import conv_gram_norms, serves_gram
from tests.unit.flash.kernels.conv_cases import CASES, exact, operands

SERVED = [name for name, case in CASES.items() if case[4] == case[8] == 1]


@pytest.fixture(autouse=True)
def kernels(backend: str) -> None:
    if backend != "triton":
        pytest.skip("the kernels have no other backend: callers unfold patches")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", SERVED)
def test_norms_are_those_of_autograd(
    name: str, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_T", block)
    monkeypatch.setattr(module, "_TILES", {"BLOCK_T": block, "BLOCK_K": 16})
    x, g, geometry, shape = operands(name, dtype=dtype)
    expected = exact(x, g, geometry, shape).flatten(1).square().sum(1)
    assert serves_gram(x, g, geometry)
    torch.testing.assert_close(conv_gram_norms(x, g, geometry, in_tf32=False), expected, rtol=1e-5, atol=0)


def test_where_positions_cancel_norms_are_those_of_the_products() -> None:
    """Two positions see the same window; their gradients differ by a thousandth of themselves."""
    x, g, geometry, shape = operands("one element", batch=3)
    x[1] = x[1, :, :1, :1]
    g[1] -= g[1].mean((1, 2), keepdim=True) * 0.999
    expected = exact(x, g, geometry, shape).flatten(1).square().sum(1)
    assert expected[1] < 1e-4 * expected[0]
    torch.testing.assert_close(conv_gram_norms(x, g, geometry, in_tf32=False), expected, rtol=1e-4, atol=0)


def test_every_finite_value_has_its_norm() -> None:
    x, g, geometry, shape = operands("three by three", batch=6)
    sizes = torch.tensor([1e-17, 1e-12, 1.0, 1e12, 1e17, 1.0])
    x, g = (each * sizes.view(-1, 1, 1, 1) for each in (x, g))
    g[5] = 0.0
    expected = exact(x, g, geometry, shape).flatten(1).square().sum(1)
    torch.testing.assert_close(conv_gram_norms(x, g, geometry, in_tf32=False), expected, rtol=1e-5, atol=0)
    g[2, 0, 0, 0], x[1, 0, 0, 0] = torch.nan, torch.inf
    found = conv_gram_norms(x, g, geometry, in_tf32=False)
    assert found.isfinite().tolist() == [True, False, False, True, True, True]


def test_what_is_not_served() -> None:
    for name in set(CASES) - set(SERVED):
        assert not serves_gram(*operands(name)[:3])
    x, g, geometry, _ = operands("one element")
    assert not serves_gram(x.new_zeros(2, 6, 17, 16), g, geometry)

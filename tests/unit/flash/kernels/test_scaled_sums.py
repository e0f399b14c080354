"""Many clipped sums in one launch equal the sums one by one, written dumbly in float64."""

from __future__ import annotations

import pytest
import torch

from dpscope.flash.kernels.scaled_sums import GroupTiles, scaled_sums

# Blocks small enough that every odd shape has inner tiles, edges and several samples.
SMALL = GroupTiles(block_m=32, block_n=32, block_k=16, num_warps=4, num_stages=2)

WIDTHS = [(40, 72), (8, 8), (96, 24)]  # rows of whole 16-byte words: what the kernel serves


def pairs(batch: int, length: int, widths: list[tuple[int, int]] = WIDTHS) -> tuple[list, list]:
    gs = [torch.randn(batch, length, p).bfloat16() for p, _ in widths]
    xs = [torch.randn(batch, length, d).bfloat16() for _, d in widths]
    return gs, xs


def expected(g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(g.shape[2], x.shape[2], dtype=torch.float64)
    for b in range(g.shape[0]):
        if scale[b] != 0:
            total += scale[b].double() * (g[b].double().T @ x[b].double())
    return total


def assert_sums(results, gs, xs, scale) -> None:
    for result, g, x in zip(results, gs, xs, strict=True):
        want = expected(g, x, scale)
        assert result.dtype == torch.float32
        # float32 accumulation of bfloat16 products: well within this; a factor rounded to bfloat16 would miss it
        assert (result.double() - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 17), (2, 33), (5, 48)])
def test_every_weight_gets_its_own_sum(backend: str, batch: int, length: int) -> None:
    gs, xs = pairs(batch, length)
    scale = torch.rand(batch)
    assert_sums(scaled_sums(gs, xs, scale, backend=backend, tiles=SMALL), gs, xs, scale)


def test_factors_may_differ_by_many_orders_of_magnitude(backend: str) -> None:
    gs, xs = pairs(4, 20)
    scale = torch.tensor([1.0, 1e-12, 3e-5, 1e6])
    assert_sums(scaled_sums(gs, xs, scale, backend=backend, tiles=SMALL), gs, xs, scale)


def test_a_sample_with_factor_zero_is_not_read(backend: str) -> None:
    gs, xs = pairs(3, 18)
    for tensor in (*gs, *xs):
        tensor[1] = float("nan")
    scale = torch.tensor([0.5, 0.0, 2.0])
    assert_sums(scaled_sums(gs, xs, scale, backend=backend, tiles=SMALL), gs, xs, scale)


def test_sums_are_added_to_what_is_there(backend: str) -> None:
    gs, xs = pairs(2, 16)
    scale = torch.rand(2)
    start = torch.randn(40, 72)
    results = scaled_sums(gs, xs, scale, outs=[start.clone(), None, None], backend=backend, tiles=SMALL)
    want = expected(gs[0], xs[0], scale) + start.double()
    assert (results[0].double() - want).norm() <= 2e-6 * want.norm()
    assert_sums(results[1:], gs[1:], xs[1:], scale)


def test_more_samples_than_one_launch_holds(backend: str) -> None:
    gs, xs = pairs(67, 16, [(8, 8)])
    scale = torch.rand(67)
    assert_sums(scaled_sums(gs, xs, scale, backend=backend, tiles=SMALL), gs, xs, scale)


def test_what_the_kernel_does_not_serve_is_summed_one_by_one() -> None:
    gs, xs = [torch.randn(2, 3, 5), torch.randn(2, 7, 4)], [torch.randn(2, 3, 6), torch.randn(2, 7, 9)]
    scale = torch.rand(2)
    assert_sums(scaled_sums(gs, xs, scale), gs, xs, scale)

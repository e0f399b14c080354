"""The compiled kernel that makes per-sample products and their norms: values, norms and layouts, on Hopper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels.sample_products import LONG_SAMPLES, OLDEST_GLUON, SHORT_SAMPLES, products_and_norms
from dpscope.flash.kernels.triton_runtime import has_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not has_triton(*OLDEST_GLUON),
        reason="needs a GPU of compute capability 9.0 and a Triton with Gluon",
    ),
    pytest.mark.filterwarnings("error:dpscope's kernel"),  # which says that it is off
]

BOTH = pytest.mark.parametrize("tiles", [SHORT_SAMPLES, LONG_SAMPLES], ids=["short", "long"])


@pytest.fixture(autouse=True)
def exact_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def made(x: Tensor, g: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    result = products_and_norms(x, g, **options)
    assert result is not None
    return result


def norms_of(values: Tensor) -> Tensor:
    return torch.stack([each.double().square().sum() for each in values])


def check(x: Tensor, g: Tensor, **options: object) -> None:
    """Values within one rounding of bfloat16, and what float32 adds up in another order; norms of what is stored."""
    values, squares = made(x, g, **options)
    assert (
        values.shape == (len(x), g.shape[2], x.shape[2]) and values.is_contiguous() and squares.dtype == torch.float64
    )
    for b, value in enumerate(values):
        exact = g[b].float().t() @ x[b].float()
        torch.testing.assert_close(value.float(), exact, rtol=2.0**-8, atol=1e-5 * exact.abs().max().item())
    torch.testing.assert_close(squares.sum(1), norms_of(values), rtol=1e-6, atol=0)


@BOTH
@pytest.mark.parametrize(
    ("batch", "length", "p", "d"),
    [
        (2, 256, 256, 512),  # whole tiles
        (3, 1000, 1000, 264),
        (2, 197, 264, 1000),
        (5, 64, 8, 8),
        (64, 65, 136, 72),
        (64, 333, 520, 264),
        (3, 4097, 128, 256),
        (8, 1024, 2048, 2048),
        (2, 2048, 8192, 2048),
        (2, 128, 32000, 2048),
    ],
)
def test_values_and_norms(tiles, batch, length, p, d) -> None:
    check(normal(batch, length, d), normal(batch, length, p), tiles=tiles)


@BOTH
def test_samples_that_lie_apart(tiles) -> None:
    """Every other sample, a part of the positions, some columns of wider rows, and an odd number of them."""
    x, g = normal(6, 400, 640)[::2, 7:340, 64:584], normal(6, 400, 328)[::2, 50:383, 8:309]
    assert g.shape[2] % 2 and not x.is_contiguous() and not g.is_contiguous()
    check(x, g, tiles=tiles)


def test_what_follows_a_sample_or_a_row_is_not_read() -> None:
    x, g = normal(3, 200, 96), normal(3, 200, 96)
    for tensor in (x, g):
        tensor[:, 101:] = float("nan")
        tensor[..., 72:] = float("nan")
    check(x[:, :101, :72], g[:, :101, :69])


@BOTH
def test_products_of_any_size_have_their_norms(tiles) -> None:
    """Tiny, huge, ordinary, with inf, with NaN, zero, and one that mixes huge and tiny values in one tile."""
    x, g = torch.randn(7, 128, 512, device="cuda"), torch.randn(7, 128, 264, device="cuda")
    x[0], g[0] = x[0] * 1e-16, g[0] * 1e-20
    x[1], g[1] = x[1] * 1e17, g[1] * 1e17
    x[3, 5, 7], x[4, 5, 7], g[5] = float("inf"), float("nan"), 0
    x[6, :, ::2] *= 1e-18
    g[6] *= 1e18
    values, squares = made(x.bfloat16(), g.bfloat16(), tiles=tiles)
    got, expected = squares.sum(1), norms_of(values)
    finite = [0, 1, 2, 5, 6]
    assert expected[finite].isfinite().all() and expected[0] > 0
    torch.testing.assert_close(got[finite], expected[finite], rtol=1e-6, atol=0)
    assert not got[[3, 4]].isfinite().any()
    assert got[5] == 0


def test_the_smallest_values_of_all_count() -> None:
    """The second sample's is below the smallest normal number: what is stored of it is what counts."""
    x, g = torch.zeros(2, 64, 8, device="cuda"), torch.zeros(2, 64, 8, device="cuda")
    x[:, 0, 0] = 2.0**-63
    g[:, 0, 0] = torch.tensor([2.0**-63, 2.0**-70], device="cuda")
    values, squares = made(x.bfloat16(), g.bfloat16())
    assert values[0, 0, 0].item() == 2.0**-126
    assert torch.equal(squares.sum(1), norms_of(values))


def test_the_same_call_gives_the_same_bits() -> None:
    x, g = normal(16, 512, 2048), normal(16, 512, 2048)
    values, squares = made(x, g)
    for _ in range(20):
        again, norms = made(x, g)
        assert torch.equal(values, again) and torch.equal(squares, norms)


def test_another_stream() -> None:
    """What is made on a stream is ordered there: operands before it, readers after it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x, g = normal(4, 300, 512) + 1, normal(4, 300, 512) + 1
        values, squares = made(x, g)
        difference = (squares.sum(1) / norms_of(values) - 1).abs().max()
    stream.synchronize()
    assert difference < 1e-6
    check(x, g)


def test_a_captured_graph_makes_them_again() -> None:
    x, g = normal(4, 300, 512), normal(4, 300, 256)
    made(x, g)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, squares = made(x, g)
    x.copy_(normal(4, 300, 512))
    graph.replay()
    expected, norms = made(x, g)
    assert torch.equal(values, expected) and torch.equal(squares, norms)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    x, g = normal(3, 200, 256).to("cuda:1"), normal(3, 200, 128).to("cuda:1")
    check(x, g)


@pytest.mark.parametrize("offset", [1, 4])
def test_rows_off_16_byte_words_are_left_to_others(offset: int) -> None:
    assert products_and_norms(normal(2, 64, 72)[..., offset : offset + 64], normal(2, 64, 64)) is None
    assert products_and_norms(normal(2, 64, 64), normal(2, 64, 64 + offset)[..., :64]) is None

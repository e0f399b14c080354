"""scaled_sums gives Σ_b c_b G_bᵀX_b of every pair, with the factor applied exactly and skipped samples never read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpscope.flash.kernels import scaled_sum, triton_runtime
from dpscope.flash.kernels.scaled_sum import WITHOUT_TMA, SumTiles, default_tiles, scaled_sums
from dpscope.flash.kernels.triton_runtime import Backend
from dpscope.vocabulary.phases import Launch, hearing
from tests.torch_here import takes_descriptors
from tests.unit.flash.kernels import kernel_references as reference
from tests.unit.flash.rounded_products import round_products, to_tf32

pytestmark = takes_descriptors

# Blocks so small that every shape here has inner tiles and edges.
SMALL = SumTiles(16, 32, 16, 4, 2)
SMALL_WITHOUT_TMA = SumTiles(16, 32, 16, 4, 2, tma=False)
CUDA = torch.device("cuda", 0)


def operands(batch: int, length: int, p: int, d: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, p).to(dtype), torch.randn(batch, length, d).to(dtype)


def sum_of(g: Tensor, x: Tensor, scale: Tensor, *, backend: Backend = "auto", tiles: SumTiles | None = None) -> Tensor:
    """The sum of a lone pair."""
    return scaled_sums([g], [x], scale, backend=backend, tiles=tiles)[0]


def assert_sum(got: Tensor, g: Tensor, x: Tensor, scale: Tensor) -> None:
    """float32 accumulation of K terms errs by about sqrt(K)·6e-8 of the terms' size; 1e-5 of the largest is ample."""
    expected = reference.scaled_sum(g, x, scale)
    bound = 1e-12 if got.dtype == torch.float64 else 1e-5
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-300)
    assert error < bound, f"relative error {error:.1e}"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_sum, "is_hopper", lambda device: True)


@pytest.mark.parametrize("tiles", [SMALL, SMALL_WITHOUT_TMA], ids=["tma", "pointers"])
@pytest.mark.parametrize("length", [16, 33, 130])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_weighted_sum(batch: int, length: int, tiles: SumTiles, backend: Backend) -> None:
    """T not a multiple of the K block; p and d not multiples of the tile."""
    g, x = operands(batch, length, 24, 40)
    scale = torch.rand(batch) + 0.1
    got = sum_of(g, x, scale, backend=backend, tiles=tiles)
    assert got.dtype == torch.float32
    assert_sum(got, g, x, scale)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_short_samples_and_every_dtype_on_auto(length: int, dtype: torch.dtype) -> None:
    g, x = operands(3, length, 5, 9, dtype)
    scale = torch.rand(3) + 0.1
    got = sum_of(g, x, scale)
    assert got.dtype == (dtype if dtype in (torch.float64, torch.float32) else torch.float32)
    assert_sum(got, g, x, scale)


def test_skipped_samples_never_reach_the_sum(backend: Backend) -> None:
    """First, last and neighbouring samples skipped; their rows hold inf and NaN, on either side."""
    g, x = operands(6, 20, 24, 40)
    scale = torch.tensor([0.0, 0.5, 0.0, 0.0, 2.0, 0.0])
    g[0], x[2], g[3], x[5] = torch.inf, torch.nan, torch.nan, torch.inf
    assert_sum(sum_of(g, x, scale, backend=backend, tiles=SMALL), g, x, scale)


def test_all_samples_skipped_gives_zero(backend: Backend) -> None:
    g, x = operands(2, 20, 24, 40)
    assert (sum_of(g * torch.nan, x, torch.zeros(2), backend=backend, tiles=SMALL) == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, 1e-38])
def test_a_factor_that_is_nan_or_vanishing_skips_its_sample(bad: float, backend: Backend) -> None:
    g, x = operands(3, 20, 24, 40)
    got = sum_of(g, x, torch.tensor([0.5, bad, 0.25]), backend=backend, tiles=SMALL)
    assert_sum(got, g, x, torch.tensor([0.5, 0.0, 0.25]))


def test_factors_that_differ_by_many_orders_of_magnitude(backend: Backend) -> None:
    """Clipping makes contributions of one size from gradients of any size: c_b · ‖v_b‖ is about the same for all."""
    scale = torch.tensor([1.0, 1e-18, 1e-3, 1e-19, 1.0, 1e-9])
    g, x = operands(6, 20, 24, 40, torch.bfloat16)
    g = (g.float() / scale[:, None, None]).bfloat16()
    assert_sum(sum_of(g, x, scale, backend=backend, tiles=SMALL), g, x, scale)


def test_the_factor_is_not_rounded_to_the_operands_precision(backend: Backend) -> None:
    """Positions that cancel inside a sample: rounding c·g to bfloat16 would leave an error of 2⁻⁹·|g|·|x|."""
    g = torch.randn(1, 32, 24).bfloat16().repeat(1, 2, 1)
    g[:, 32:] *= -1
    x = torch.randn(1, 32, 40).bfloat16().repeat(1, 2, 1)
    x[:, 63] = 0
    scale = torch.tensor([1 / 3])
    assert_sum(sum_of(g, x, scale, backend=backend, tiles=SMALL), g, x, scale)


def test_adding_into_out(backend: Backend) -> None:
    """Twice: what the first call left there counts."""
    g, x = operands(3, 20, 24, 40)
    scale = torch.rand(3) + 0.1
    out = torch.full((24, 40), 7.0)
    for _ in range(2):
        (returned,) = scaled_sums([g], [x], scale, outs=[out], backend=backend, tiles=SMALL)
        assert returned is out
    assert_sum(out - 7.0, g, x, 2 * scale)


def test_more_samples_than_one_launch_takes(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_sum, "_MAX_SAMPLES", 4)
    g, x = operands(9, 16, 8, 16)
    scale = torch.rand(9) + 0.1
    assert_sum(sum_of(g, x, scale, backend=backend, tiles=SMALL), g, x, scale)


@pytest.mark.parametrize(("p", "d"), [(25, 40), (24, 41), (23, 39)])
@pytest.mark.parametrize("into", [False, True])
def test_widths_that_no_word_divides(p: int, d: int, into: bool, backend: Backend) -> None:
    """A vocabulary of 50,257: rows are filled up with zeros, and what those give is cut off again."""
    g, x = operands(3, 33, p, d)
    scale = torch.tensor([0.5, 0.0, 2.0])
    g[1] = torch.nan
    start = torch.randn(p, d) if into else torch.zeros(p, d)
    (got,) = scaled_sums([g], [x], scale, outs=[start.clone() if into else None], backend=backend, tiles=SMALL)
    assert got.is_contiguous()
    assert_sum(got - start, g, x, scale)


def test_rows_of_wider_buffers(backend: Backend) -> None:
    wide = torch.randn(3, 20, 96).bfloat16()
    g, x = wide[:, :, 16:40], wide[:, :, 48:88]
    scale = torch.rand(3) + 0.1
    assert_sum(sum_of(g, x, scale, backend=backend, tiles=SMALL), g, x, scale)


def test_transposed_operands_on_auto() -> None:
    g, x = torch.randn(3, 8, 20).transpose(1, 2), torch.randn(20, 3, 8).transpose(0, 1)
    scale = torch.rand(3) + 0.1
    assert_sum(sum_of(g, x, scale), g, x, scale)


@pytest.mark.parametrize(("length", "d"), [(70, 8), (70, 128), (70, 136), (128, 264)])
def test_default_tiles_of_every_width(length: int, d: int, backend: Backend) -> None:
    """Narrower than the narrow tile, exactly it, one wide tile, two of them; short and long steps."""
    g, x = operands(2, length, 136, d)
    scale = torch.tensor([0.5, 0.25])
    assert_sum(sum_of(g, x, scale, backend=backend), g, x, scale)


def test_narrow_inputs_get_narrow_tiles(on_hopper: None) -> None:
    narrow = SumTiles(block_n=128, num_warps=4)
    assert [default_tiles(256, d, CUDA) for d in (8, 128)] == [narrow, narrow]
    assert [default_tiles(256, d, CUDA) for d in (136, 256, 2048)] == [SumTiles()] * 3


def test_cards_without_the_copy_engine_load_through_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_sum, "is_hopper", lambda device: False)
    assert default_tiles(256, 2048, CUDA) == WITHOUT_TMA
    assert default_tiles(256, 64, CUDA).block_n == 128


@pytest.mark.parametrize(("length", "step"), [(64, 64), (256, 64), (568, 64), (1312, 64), (32, 32), (136, 32)])
def test_samples_that_leave_much_of_their_last_step_empty_are_walked_in_shorter_ones(
    length: int, step: int, on_hopper: None
) -> None:
    for d, narrow in ((2048, {}), (64, {"block_n": 128, "num_warps": 4})):
        stages = {64: 3, 32: 6}[step]
        assert default_tiles(length, d, CUDA) == SumTiles(block_k=step, num_stages=stages, **narrow)


def test_an_empty_batch_gives_zero() -> None:
    g, x = operands(0, 5, 3, 4)
    assert (sum_of(g, x, torch.zeros(0)) == torch.zeros(3, 4)).all()


# -- many pairs --------------------------------------------------------------------------------------------------------

# Two weights of one shape, and others: rows of whole 16-byte words, which is what the kernel serves.
WIDTHS = [(40, 72), (8, 8), (40, 72), (96, 24)]


def pairs(batch: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    gs, xs = zip(*(operands(batch, length, p, d) for p, d in WIDTHS), strict=True)
    return list(gs), list(xs)


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 17), (5, 48)])
def test_every_weight_gets_its_own_sum(batch: int, length: int, backend: Backend) -> None:
    gs, xs = pairs(batch, length)
    scale = torch.rand(batch) + 0.1
    for got, g, x in zip(scaled_sums(gs, xs, scale, backend=backend, tiles=SMALL), gs, xs, strict=True):
        assert_sum(got, g, x, scale)


@pytest.mark.parametrize("batch", [3, 70])
def test_weights_of_one_launch_have_factors_of_their_own(batch: int, backend: Backend) -> None:
    """More samples than one launch takes; one weight leaves out a sample that is not finite, the others its zeros."""
    gs, xs = pairs(batch, 17)
    scale, rows = torch.rand(3, batch) + 0.1, [2, 0, 1, 2]
    expected = [g.clone() for g in gs]
    scale[1, 2], gs[2][2] = 0.0, torch.nan
    expected[2][2] = 0.0
    launches: list[Launch] = []
    with hearing(launches.append):
        found = scaled_sums(gs, xs, scale, rows=rows, backend=backend, tiles=SMALL)
    for got, g, x, row in zip(found, expected, xs, rows, strict=True):
        assert_sum(got, g, x, scale[row])
    assert len(launches) == (backend == "triton")


def test_sums_are_added_to_what_is_there(backend: Backend) -> None:
    """Some of one shape with an `out`, some without."""
    gs, xs = pairs(2, 16)
    scale = torch.rand(2) + 0.1
    start = torch.full((40, 72), 7.0)
    results = scaled_sums(gs, xs, scale, outs=[start, None, None, None], backend=backend, tiles=SMALL)
    assert results[0] is start
    start -= 7.0
    for got, g, x in zip(results, gs, xs, strict=True):
        assert_sum(got, g, x, scale)


def test_pairs_of_other_strides_and_into_other_strides(backend: Backend) -> None:
    wide = torch.randn(3, 20, 96).bfloat16()
    gs, xs = [wide[:, :, 16:40], wide[:, :, :24].contiguous()], [wide[:, :, 48:88]] * 2
    scale = torch.rand(3) + 0.1
    outs = [torch.zeros(24, 48)[:, :40], torch.zeros(24, 40)]
    for got, g, x in zip(scaled_sums(gs, xs, scale, outs=outs, backend=backend, tiles=SMALL), gs, xs, strict=True):
        assert_sum(got, g, x, scale)


def test_what_the_kernel_does_not_serve_is_summed_one_by_one() -> None:
    """Odd widths, short samples and a pair that starts off a 16-byte boundary, beside one of the same shape."""
    wide = torch.randn(2, 20, 64).bfloat16()
    gs = [torch.randn(2, 3, 5), torch.randn(2, 7, 4), wide[:, :, 8:16], wide[:, :, 1:9]]
    xs = [torch.randn(2, 3, 6), torch.randn(2, 7, 9), wide[:, :, 16:32], wide[:, :, 16:32]]
    scale = torch.rand(2) + 0.1
    for got, g, x in zip(scaled_sums(gs, xs, scale), gs, xs, strict=True):
        assert_sum(got, g, x, scale)


def test_no_pairs_give_no_sums() -> None:
    assert scaled_sums([], [], torch.ones(2)) == []


def test_small_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "CHUNK_BYTES", 1)
    g, x = operands(3, 5, 6, 7)
    scale = torch.rand(3)
    assert_sum(sum_of(g, x, scale, backend="torch"), g, x, scale)


def test_shapes_that_do_not_fit_are_refused() -> None:
    g, x = operands(2, 5, 3, 4)
    with pytest.raises(ValueError, match="expected g"):
        scaled_sums([g], [x[:, :4]], torch.ones(2))
    with pytest.raises(ValueError, match="expected scale"):
        scaled_sums([g], [x], torch.ones(3))
    with pytest.raises(ValueError, match="expected out"):
        scaled_sums([g], [x], torch.ones(2), outs=[torch.zeros(4, 3)])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scale=st.lists(st.sampled_from([0.0, 1.0, 0.3, 1e-6]), min_size=1, max_size=4),
    length=st.integers(16, 40),
    p=st.integers(1, 5),
    d=st.integers(1, 5),
)
def test_any_shape(scale: list[float], length: int, p: int, d: int, backend: Backend) -> None:
    g, x = operands(len(scale), length, 8 * p, 8 * d)
    factors = torch.tensor(scale)
    assert_sum(sum_of(g, x, factors, backend=backend, tiles=SMALL), g, x, factors)


# -- float32 products that the user lets torch round -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_rounded_products_are_summed_as_their_norms_saw_them(
    dtype: torch.dtype, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor multiplies the rounded product; nothing is rounded with the factor in it."""
    round_products(monkeypatch)
    monkeypatch.setattr(triton_runtime, "SCRATCH_BYTES", 2 * 4 * 5 * 9)
    g, x = operands(5, 6, 5, 9, dtype)
    scale = torch.tensor([0.3, 0.0, 1.7, 2.0**-101, 0.9])
    g[1], x[3] = torch.nan, torch.inf
    before = torch.randn(5, 9)
    got = scaled_sums([g], [x], scale, outs=[before.clone() if add else None])[0]
    live = scale >= 1e-3
    expected = reference.scaled_sum(to_tf32(g), to_tf32(x), scale.where(live, 0.0)) + (before if add else 0)
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-6, atol=2e-6)  # TF32 errs by 1e-3


def test_a_pair_of_odd_width_leaves_the_others_in_one_launch(backend: Backend) -> None:
    """A head of 50,257 columns must not cost all other layers of the step a launch each."""
    if backend != "triton":
        pytest.skip("launches are counted where kernels run")
    pairs = [operands(2, 16, 16, 32), operands(2, 16, 21, 32), operands(2, 16, 16, 32)]
    scale = torch.rand(2) + 0.1
    launches: list[Launch] = []
    with hearing(launches.append):
        sums = scaled_sums(*map(list, zip(*pairs, strict=True)), scale, backend=backend, tiles=SMALL)
    assert sorted(len(launch.writes) for launch in launches) == [1, 2]
    for got, (g, x) in zip(sums, pairs, strict=True):
        assert_sum(got, g, x, scale)

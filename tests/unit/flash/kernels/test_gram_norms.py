"""gram_norms_squared gives the squared norm of each sample's weight gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpscope.flash.kernels import gram_norms, triton_runtime
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramTiles, GramUnit
from tests.torch_here import takes_descriptors
from tests.unit.flash.kernels import kernel_references as reference

# Products of half types are exact in float32, so all that is left is float32 summation: ~sqrt(T·d) roundings of 6e-8,
# under 1e-5 at these sizes. The reference sees the same rounded inputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}

SMALL = GramTiles(16, 16, 16, 4, 2, tma=False)
SMALL_TMA = GramTiles(16, 32, 16, 4, 2, tma=True)


def unit(batch: int, length: int, ds: list[int], ps: list[int], dtype: torch.dtype = torch.float32) -> GramUnit:
    return GramUnit(
        xs=tuple(torch.randn(batch, length, d).to(dtype) for d in ds),
        gs=tuple(torch.randn(batch, length, p).to(dtype) for p in ps),
    )


def assert_norms(units: list[GramUnit], backend: str, tiles: GramTiles | None = None) -> None:
    dtype = units[0].gs[0].dtype
    got = gram_norms_squared(units, backend=backend, tiles=tiles)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, reference.gram_norms_squared(units), rtol=TOLERANCE[dtype], atol=1e-30)


@pytest.mark.parametrize("length", [1, 7, 33, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_layer(length: int, dtype: torch.dtype, backend: str) -> None:
    assert_norms([unit(3, length, [24], [40], dtype)], backend)


@pytest.mark.parametrize(
    "tiles", [pytest.param(SMALL, id="pointers"), pytest.param(SMALL_TMA, id="descriptors", marks=takes_descriptors)]
)
def test_tiles_smaller_than_the_problem(tiles: GramTiles, backend: str) -> None:
    """Several tiles each way, with ragged edges in T and in the features; square and oblong tiles."""
    assert_norms([unit(2, 71, [40], [56], torch.bfloat16)], backend, tiles)


def test_widths_that_are_not_multiples_of_eight(backend: str) -> None:
    assert_norms([unit(2, 19, [13], [5], torch.bfloat16)], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_samples_of_such_widths(dtype: torch.dtype, backend: str) -> None:
    """They are filled up to whole words first where that pays; those of whole words stay as they are."""
    assert_norms([unit(2, 130, [33], [57], dtype), unit(2, 130, [32, 9], [56], dtype)], backend)


def test_layers_that_share_their_input(backend: str) -> None:
    assert_norms([unit(2, 33, [24], [16, 40, 8], torch.bfloat16)], backend, SMALL)


def test_inputs_put_side_by_side(backend: str) -> None:
    assert_norms([unit(2, 33, [24, 8], [16], torch.bfloat16)], backend, SMALL)


def test_many_units_of_different_shapes_add_up(backend: str) -> None:
    units = [
        unit(3, 20, [8], [16], torch.bfloat16),
        unit(3, 20, [48], [16, 16], torch.bfloat16),
        unit(3, 9, [8], [7], torch.bfloat16),
        unit(3, 1, [8], [8], torch.bfloat16),
    ]
    assert_norms(units, backend)


def test_float64_falls_back_and_stays_float64() -> None:
    assert_norms([unit(2, 11, [6], [5], torch.float64)], "auto")


def test_the_input_and_the_gradient_may_differ_in_dtype(backend: str) -> None:
    mixed = GramUnit(
        xs=(torch.randn(2, 18, 24).bfloat16(),),
        gs=(torch.randn(2, 18, 16),),
    )
    got = gram_norms_squared([mixed], backend=backend)
    torch.testing.assert_close(got.double(), reference.gram_norms_squared([mixed]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_contiguous_inputs(dtype: torch.dtype, backend: str) -> None:
    """Slices of wider buffers, transposed features, and a batch that was expanded."""
    wide = torch.randn(3, 21, 64).to(dtype)
    sliced = GramUnit(xs=(wide[:, :, 8:24],), gs=(wide[:, :, 40:61],))
    transposed = GramUnit(
        xs=(torch.randn(3, 16, 21).to(dtype).transpose(1, 2),),
        gs=(torch.randn(1, 21, 8).to(dtype).expand(3, 21, 8),),
    )
    assert_norms([sliced, transposed], backend)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("length", [1, 7, 50])
def test_embedding(length: int, padding_idx: int | None, backend: str) -> None:
    ids = torch.randint(0, 5, (3, length))
    embedding = GramUnit(ids=ids, gs=(torch.randn(3, length, 24).bfloat16(),), padding_idx=padding_idx)
    assert_norms([embedding], backend, SMALL)


def test_embedding_whose_far_tiles_share_no_ids(backend: str) -> None:
    """Sorted ids: almost every tile off the diagonal is skipped, and the result does not change."""
    ids = torch.arange(64).div(3, rounding_mode="floor").expand(2, 64)
    assert_norms([GramUnit(ids=ids, gs=(torch.randn(2, 64, 24),))], backend, SMALL)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_non_finite_sample_spoils_only_its_own_norm(poison: float, backend: str) -> None:
    poisoned = unit(3, 37, [24], [16], torch.bfloat16)
    poisoned.gs[0][1, 36, 3] = poison
    got = gram_norms_squared([poisoned], backend=backend, tiles=SMALL)
    assert not torch.isfinite(got[1])
    keep = torch.tensor([0, 2])
    clean = GramUnit(xs=(poisoned.xs[0][keep],), gs=(poisoned.gs[0][keep],))
    torch.testing.assert_close(got[keep].double(), reference.gram_norms_squared([clean]), rtol=1e-5, atol=0)


def cancelling(batch: int, length: int, dtype: torch.dtype, slip: float) -> GramUnit:
    """Positions in pairs, g and -g with x and x·(1 ± slip): the gradient is about slip times what its positions are."""
    x = torch.randn(batch, length, 32).repeat_interleave(2, dim=1)
    g = torch.randn(batch, length, 24).repeat_interleave(2, dim=1)
    x[:, 1::2] *= 1 + slip * torch.randn(batch, length, 32)
    g[:, 1::2] *= -1
    return GramUnit(xs=(x.to(dtype),), gs=(g.to(dtype),))


@pytest.mark.parametrize("slip", [0.0, 1e-5, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_never_too_small_where_positions_cancel(dtype: torch.dtype, slip: float, backend: str) -> None:
    """A norm that is too small would let a gradient through that should be clipped."""
    one = cancelling(2, 24, dtype, slip)
    got = gram_norms_squared([one], backend=backend, tiles=SMALL).double().sqrt()
    assert (got >= (1 - 1e-3) * reference.gram_norms_squared([one]).sqrt()).all()
    ceiling = 2.0**-7 * reference.lengths(one)  # the square root of FLOOR
    assert (got <= torch.maximum(ceiling, reference.gram_norms_squared([one]).sqrt()) * (1 + 1e-3)).all()
    if slip == 0.0:
        torch.testing.assert_close(got, ceiling, rtol=1e-5, atol=0)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_a_norm_is_never_too_small_where_lookups_cancel(padding_idx: int | None, backend: str) -> None:
    """One id receives g and -g; padding is not counted in the floor."""
    ids = torch.tensor([[0, 0, 1, 1, 1]]).repeat(2, 4)
    g = torch.randn(2, 20, 24)
    g[:, 1::5] = -g[:, 0::5]
    g[:, 2::5] = 0.0
    g[:, 4::5] = -g[:, 3::5]
    one = GramUnit(ids=ids, gs=(g,), padding_idx=padding_idx)
    got = gram_norms_squared([one], backend=backend, tiles=SMALL).double().sqrt()
    counted = g.double().norm(dim=2).masked_fill(ids == padding_idx, 0.0) if padding_idx else g.double().norm(dim=2)
    torch.testing.assert_close(got, 2.0**-7 * counted.sum(1), rtol=1e-5, atol=0)


def test_each_unit_has_its_own_floor(backend: str) -> None:
    """The floor is part of a unit's square; beside an ordinary unit it is added, not compared with the total."""
    ordinary, vanishing = unit(3, 20, [24], [16], torch.bfloat16), cancelling(3, 10, torch.bfloat16, 0.0)
    expected = reference.gram_norms_squared([ordinary]) + 2.0**-14 * reference.lengths(vanishing).square()
    got = gram_norms_squared([ordinary, vanishing], backend=backend, tiles=SMALL)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


def test_the_floor_in_float64_is_lower() -> None:
    one = cancelling(2, 24, torch.float64, 1e-4)
    torch.testing.assert_close(gram_norms_squared([one]), reference.gram_norms_squared([one]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("length", [64, 300])
def test_ordinary_data_never_meets_the_floor(length: int, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    units = [unit(2, length, [24], [16], torch.bfloat16)]
    floored = gram_norms_squared(units, backend=backend)
    monkeypatch.setattr(gram_norms, "FLOOR", 0.0)
    torch.testing.assert_close(floored, gram_norms_squared(units, backend=backend), rtol=1e-6, atol=0)


def test_an_empty_batch_gives_no_norms() -> None:
    assert gram_norms_squared([unit(0, 5, [4], [3])]).shape == (0,)


def test_the_fallback_in_small_chunks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "CHUNK_BYTES", 1000)
    assert_norms([unit(3, 40, [24], [16], torch.bfloat16)], "torch")
    assert_norms([unit(3, 40, [24], [16], torch.float64)], "torch")


def test_units_of_equal_shapes_are_told_apart_by_strides_dtypes_ids_and_sharing(backend: str) -> None:
    """Launches are planned once for units that look alike: what does not may not share a plan."""
    x, g = torch.randn(2, 24, 24), torch.randn(2, 24, 24)
    wide, flat = torch.randn(2, 24, 56), torch.randn(2 * 24 * 24 + 3)
    ids = torch.randint(0, 5, (2, 24))
    lists = [
        [GramUnit((g,), (x,))],
        [GramUnit((g.mT,), (x,))],
        [GramUnit((g,), (x.mT,))],
        [GramUnit((wide[..., 16:40],), (x,))],
        [GramUnit((flat[3:].view(2, 24, 24),), (x,))],
        [GramUnit((g[:1].expand(2, -1, -1),), (x,))],
        [GramUnit((g.bfloat16(),), (x.bfloat16(),))],
        [GramUnit((g.bfloat16(),), (x,))],
        [GramUnit((g,), ids=ids)],
        [GramUnit((g,), ids=ids, padding_idx=2)],
        [GramUnit((g, g.flip(0)), (x,))],
        [GramUnit((g,), (x,)), GramUnit((g.flip(0),), (x,))],
        [GramUnit((g,), (x, x.flip(1)))],
        [GramUnit((g[:, :12],), (x[:, :12],)), GramUnit((g,), ids=ids)],
    ]
    for units in (*lists, *lists[:3]):
        assert_norms(units, backend, SMALL)


def test_units_must_share_the_batch_size() -> None:
    with pytest.raises(ValueError, match="share the batch size"):
        gram_norms_squared([unit(2, 3, [4], [4]), unit(3, 3, [4], [4])])


def test_a_unit_needs_one_kind_of_input() -> None:
    with pytest.raises(ValueError, match="either xs or ids"):
        gram_norms_squared([GramUnit(gs=(torch.zeros(1, 2, 3),))])
    with pytest.raises(ValueError, match="expected ids"):
        gram_norms_squared([GramUnit(gs=(torch.zeros(1, 2, 3),), ids=torch.zeros(1, 3, dtype=torch.int64))])
    with pytest.raises(ValueError, match="features"):
        gram_norms_squared([GramUnit(gs=(torch.zeros(1, 2, 3),), xs=(torch.zeros(1, 3, 3),))])


def test_forcing_triton_where_it_cannot_run_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET|does not serve"):
        gram_norms_squared([unit(2, 3, [4], [4], torch.float64)], backend="triton")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    d=st.integers(1, 40),
    p=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape(batch: int, length: int, d: int, p: int, dtype: torch.dtype, backend: str) -> None:
    assert_norms([unit(batch, length, [d], [p], dtype)], backend, SMALL)


EXPONENTS = ((-25, 0), (0, -25), (-25, -30), (17, 2), (25, 3), (30, -28), (-34, 37), (37, -34))  # of ten, of x and g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_ids", [False, True])
def test_norms_hold_for_every_finite_float32(dtype, with_ids, backend) -> None:
    """Beside samples of ordinary size, zeros, and one that is not finite, which none of the others notices."""
    batch, length = 4 + len(EXPONENTS), 19
    x, g = torch.randn(batch, length, 8), torch.randn(batch, length, 24)
    g[1] = 0.0
    x[2, 4, 1] = float("nan")
    g[2, 2, 3] = float("inf")
    # A position whose x is tiny and whose g is huge, beside others of ordinary size.
    x[3, 7], g[3, 7] = x[3, 7] * 1e-30, g[3, 7] * 1e31
    for sample, (of_x, of_g) in enumerate(EXPONENTS, 4):
        x[sample] *= 10.0**of_x
        g[sample] *= 10.0**of_g
    x, g = x.to(dtype), g.to(dtype)
    ids = torch.randint(0, 5, (batch, length))
    unit = GramUnit((g,), ids=ids) if with_ids else GramUnit((g,), (x,))
    got = gram_norms_squared([unit], backend=backend, tiles=SMALL if backend == "triton" else None)
    left = torch.nn.functional.one_hot(ids, 5).double() if with_ids else x.double()
    truth = torch.bmm(g.double().mT, left).square().sum((1, 2))
    finite = torch.arange(batch) != 2
    torch.testing.assert_close(got[finite], truth[finite], rtol=1e-5, atol=0.0)
    assert not got[2].isfinite()

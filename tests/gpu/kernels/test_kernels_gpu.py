"""The compiled kernels at realistic sizes, against the references of the unit tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels.float32_products import truncated_to_tf32
from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramTiles, GramUnit
from dpscope.flash.kernels.kept_gradients import kept_norms_squared, kept_sums
from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.kernels.rms_norm import rms_norm_gradients
from dpscope.flash.kernels.sample_sums import bias_sums, layer_norm_sums, many_bias_sums
from dpscope.flash.kernels.scaled_sum import WITHOUT_TMA, SumTiles, scaled_sums
from dpscope.flash.kernels.tensor_lists import noise_starts
from tests.unit.flash.kernels import kernel_references as reference
from tests.unit.flash.kernels.noise_values import noise_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Tensor cores add in float32 but truncate where a scalar unit would round: measured 1e-5 to 3e-5 on squared norms.
GRAM_TOLERANCE = {"rtol": 1e-4, "atol": 0.0}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nothing_synchronises() -> Iterator[None]:
    """Any call that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def unit(batch: int, length: int, ds: list[int], ps: list[int], dtype: torch.dtype = torch.bfloat16) -> GramUnit:
    return GramUnit(
        xs=tuple(rows(batch, length, d, dtype=dtype) for d in ds),
        gs=tuple(rows(batch, length, p, dtype=dtype) for p in ps),
    )


def assert_norms(units: list[GramUnit], **options: Any) -> None:
    got = gram_norms_squared(units, backend="triton", **options)
    torch.testing.assert_close(got.double(), reference.gram_norms_squared(units), **GRAM_TOLERANCE)


# -- gram_norms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("exponents", [(-25, 0), (0, -25), (17, 2), (25, 3), (30, -28)])
def test_norms_hold_for_every_finite_float32(dtype, with_ids, exponents, request) -> None:
    batch, length, d, p = 6, 130, 64, 136
    x, g = rows(batch, length, d, dtype=torch.float32), rows(batch, length, p, dtype=torch.float32)
    x[1] *= 10.0 ** exponents[0]
    g[1] *= 10.0 ** exponents[1]
    g[2] = 0.0
    g[3, 5, 7].fill_(float("nan"))
    x[4, 7] *= 1e-30
    g[4, 7] *= 1e31
    x, g = x.to(dtype), g.to(dtype)
    ids = (torch.arange(batch * length, device="cuda") % 7).view(batch, length)
    units = [GramUnit((g,), ids=ids) if with_ids else GramUnit((g,), (x,))]
    for backend in ("triton", "auto"):  # the first call of a shape copies its tables to the device, and waits
        gram_norms_squared(units, backend=backend)
    request.getfixturevalue("nothing_synchronises")
    got = gram_norms_squared(units, backend="triton")
    by_torch = gram_norms_squared(units)  # float32: sums by cuBLAS, the rest by the kernel
    torch.cuda.set_sync_debug_mode("default")
    left = torch.nn.functional.one_hot(ids, 7).double() if with_ids else x.double()
    truth = torch.bmm(g.double().mT, left).square().sum((1, 2))
    for found in (got, by_torch):
        for sample in (0, 1, 2, 4, 5):
            assert found[sample].item() == pytest.approx(truth[sample].item(), rel=1e-4), sample
        assert not found[3].isfinite()


@pytest.mark.parametrize("length", [1, 7, 33, 130, 256, 1000, 1024])
def test_gram_norms_of_a_transformer_layer(length: int) -> None:
    """q, k, v sharing their input, o, up and down in one launch."""
    d = 512
    assert_norms(
        [
            unit(3, length, [d], [d, d, d]),
            unit(3, length, [d], [d]),
            unit(3, length, [d], [4 * d]),
            unit(3, length, [4 * d], [d]),
        ]
    )


@pytest.mark.parametrize(
    "tiles",
    [
        GramTiles(128, 128, 64, 8, 4, tma=True),
        GramTiles(64, 128, 128, 4, 2, tma=True),
        GramTiles(64, 64, 64, 4, 3, tma=True),
        GramTiles(128, 128, 64, 8, 3, tma=False),
        GramTiles(64, 64, 64, 4, 3, tma=False),
    ],
    ids=str,
)
def test_gram_norms_with_every_kind_of_tile(tiles: GramTiles) -> None:
    assert_norms([unit(2, 300, [264], [136, 72])], tiles=tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gram_norms_of_odd_widths_and_strides(dtype: torch.dtype) -> None:
    wide = rows(3, 70, 640, dtype=dtype)
    assert_norms([GramUnit(xs=(wide[:, :, 3:100],), gs=(wide[:, :, 200:333],)), unit(3, 50, [13], [5], dtype)])


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("length", "width"), [(16, 8), (256, 16), (256, 512), (1024, 2048)])
def test_gram_norms_in_float32_are_as_near_as_float32_whatever_the_user_allows(length, width, precision) -> None:
    """Three products of tf32 halves keep 22 bits of a factor: 2⁻²² a factor, four factors, averaged over many terms."""
    one = unit(2, length, [width], [width], torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = gram_norms_squared([one], backend="triton")
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got.double(), reference.gram_norms_squared([one]), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("length", "width"), [(16, 8), (100, 13), (256, 512), (1024, 2048), (300, 16384)])
def test_gram_norms_of_operands_that_tf32_holds_take_one_product(length: int, width: int) -> None:
    """Tensor cores cut an accumulator off after every 8 features: by at most 2⁻²⁴ of it each time."""
    whole = unit(2, length, [width], [width, 8], torch.float32)
    gs, xs = (tuple(map(truncated_to_tf32, side)) for side in (whole.gs, whole.xs))
    one = GramUnit(gs=gs, xs=xs, in_tf32=True)
    got = gram_norms_squared([one], backend="triton")
    rtol = 2e-6 + 2 * width / 8 * 2.0**-24
    torch.testing.assert_close(got.double(), reference.gram_norms_squared([one]), rtol=rtol, atol=0)


@pytest.mark.parametrize("vocabulary", [4, 32000])
@pytest.mark.parametrize("length", [7, 300, 1024])
def test_gram_norms_of_an_embedding(length: int, vocabulary: int) -> None:
    ids = torch.randint(0, vocabulary, (3, length), device="cuda")
    assert_norms([GramUnit(ids=ids, gs=(rows(3, length, 512),), padding_idx=int(ids[0, 0]))])


def test_a_non_finite_sample_spoils_only_its_own_norm() -> None:
    one = unit(4, 300, [256], [256])
    one.gs[0][2, 299] = torch.inf
    got = gram_norms_squared([one], backend="triton")
    assert got.isfinite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("slip", [0.0, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("kind", ["bfloat16", "tf32"])
def test_gram_norms_are_never_too_small_where_positions_cancel(length: int, slip: float, kind: str) -> None:
    """Positions in pairs, g and -g with x nearly the same: the gradient is about slip times what its positions are."""
    x, g = (torch.randn(3, length, 512, device="cuda").repeat_interleave(2, dim=1) for _ in range(2))
    x[:, 1::2] *= 1 + slip * torch.randn(3, length, 512, device="cuda")
    g[:, 1::2] *= -1
    rounded = truncated_to_tf32 if kind == "tf32" else torch.Tensor.bfloat16
    one = GramUnit(xs=(rounded(x),), gs=(rounded(g),), in_tf32=kind == "tf32")
    got = gram_norms_squared([one], backend="triton").double().sqrt()
    exact = reference.gram_norms_squared([one]).sqrt()
    assert (got >= (1 - 1e-3) * exact).all()
    assert (got <= (1 + 1e-3) * torch.maximum(exact, 2.0**-7 * reference.lengths(one))).all()


def test_gram_norms_are_deterministic() -> None:
    units = [unit(4, 500, [256], [256]), unit(4, 500, [256], [1024])]
    assert torch.equal(gram_norms_squared(units), gram_norms_squared(units))


def test_gram_norms_from_another_thread() -> None:
    """Backward hooks run in autograd's threads, where a context variable set by the main thread is not seen."""
    units, results = [unit(2, 256, [256], [256])], []
    thread = threading.Thread(target=lambda: results.append(gram_norms_squared(units, backend="triton")))
    thread.start()
    thread.join()
    torch.testing.assert_close(results[0].double(), reference.gram_norms_squared(units), **GRAM_TOLERANCE)


# -- scaled_sum --------------------------------------------------------------------------------------------------------


def assert_sum(got: Tensor, g: Tensor, x: Tensor, scale: Tensor) -> None:
    """Float32 accumulation over thousands of terms, truncated by tensor cores: 1e-4 of the largest entry."""
    expected = reference.scaled_sum(g, x, scale)
    assert (got.double() - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "tiles",
    [
        SumTiles(),
        SumTiles(128, 256, 64, 8, 4),
        SumTiles(256, 128, 64, 8, 4),
        SumTiles(128, 128, 64, 4, 3),
        WITHOUT_TMA,
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [16, 256, 1000])
def test_scaled_sum(length: int, tiles: SumTiles) -> None:
    """Skipped samples with inf and NaN, factors over many orders of magnitude, ragged p, d and T."""
    scale = torch.tensor([0.0, 1.0, 1e-18, 0.3, 0.0, 1e-6, 0.7, 0.0], device="cuda")
    g = (torch.randn(8, length, 520, device="cuda") / scale.clamp_min(1e-18)[:, None, None]).bfloat16()
    x = rows(8, length, 776)
    g[0], x[4] = torch.nan, torch.inf
    assert_sum(scaled_sums([g], [x], scale, backend="triton", tiles=tiles)[0], g, x, scale)
    out = torch.ones(520, 776, device="cuda")
    scaled_sums([g], [x], scale, backend="triton", tiles=tiles, outs=[out])
    assert_sum(out - 1.0, g, x, scale)


def test_scaled_sum_over_more_samples_than_one_launch_takes() -> None:
    g, x = rows(70, 32, 256), rows(70, 32, 128)
    scale = torch.rand(70, device="cuda")
    assert_sum(scaled_sums([g], [x], scale, backend="triton")[0], g, x, scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scaled_sum_of_shapes_the_kernel_does_not_serve(dtype: torch.dtype) -> None:
    g, x = rows(5, 3, 10, dtype=dtype), rows(5, 3, 33, dtype=dtype)
    scale = torch.rand(5, device="cuda")
    assert_sum(scaled_sums([g], [x], scale)[0], g, x, scale)


def test_scaled_sum_of_logits_that_a_loss_took_class_by_class() -> None:
    """Their gradient comes as (B, classes, T): one copy with whole rows, and nothing in float32."""
    g = rows(4, 1024, 128).transpose(1, 2)
    x, scale = rows(4, 128, 256), torch.rand(4, device="cuda")
    scaled_sums([g], [x], scale)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = scaled_sums([g], [x], scale)[0]
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (g.nbytes + 2 * got.nbytes)
    assert_sum(got, g, x, scale)
    out = torch.ones_like(got)
    scaled_sums([g, rows(4, 128, 1024)], [x, x], scale, outs=[out, None])
    assert_sum(out - 1.0, g, x, scale)


def test_scaled_sums_of_many_weights() -> None:
    """Weights of one shape share a launch; wide, ragged and narrow ones, with the tiles each gets by default."""
    widths = [(1024, 512)] * 9 + [(512, 1024)] * 5 + [(72, 264), (520, 128), (72, 8)]
    gs, xs = [rows(3, 200, p) for p, _ in widths], [rows(3, 200, d) for _, d in widths]
    scale = torch.tensor([0.5, 0.0, 0.3], device="cuda")
    gs[4][1] = torch.nan
    outs = [torch.ones(1024, 512, device="cuda"), *[None] * 16]
    results = scaled_sums(gs, xs, scale, outs=outs, backend="triton")
    results[0] -= 1.0
    for got, g, x in zip(results, gs, xs, strict=True):
        assert_sum(got, g, x, scale)


# -- sample_sums -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [256, 1000, 1023, 2048])
def test_bias_sums_of_long_samples(length: int) -> None:
    """Part by part, where the length has parts: without scratch memory that is larger than g."""
    g = rows(8, length, 1024)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = bias_sums(g[..., :1000])
    if length % 8 == 0:
        assert torch.cuda.max_memory_allocated() - before <= g.nbytes // 2
    torch.testing.assert_close(got.double(), g[..., :1000].double().sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("batch", "length", "width"), [(8, 1024, 2048), (1, 16384, 300), (3, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_sums(batch: int, length: int, width: int, dtype: torch.dtype) -> None:
    g, x = rows(batch, length, width, dtype=dtype), rows(batch, length, width)
    mean, rstd = rows(batch, length, dtype=torch.float32), torch.rand(batch, length, device="cuda")
    expected_gamma, expected_beta = reference.layer_norm_sums(g, x, mean, rstd)
    dgamma, dbeta = layer_norm_sums(g, x, mean, rstd, backend="triton")
    close = {"rtol": 1e-5, "atol": 1e-6 * length**0.5 * 10}
    torch.testing.assert_close(dgamma.double(), expected_gamma, **close)
    torch.testing.assert_close(dbeta.double(), expected_beta, **close)
    stretches = layer_norm_sums(g, x, mean, rstd, whole=False, backend="triton")
    if stretches[0].dim() == 3:
        dgamma, dbeta = many_bias_sums(stretches, backend="triton")
        torch.testing.assert_close(dgamma.double(), expected_gamma, **close)
        torch.testing.assert_close(dbeta.double(), expected_beta, **close)
    torch.testing.assert_close(bias_sums(g).double(), expected_beta, **close)
    wide = rows(batch, length, width + 9, dtype=dtype)
    for got, each in zip(many_bias_sums([g, wide, g], backend="triton"), (g, wide, g), strict=True):
        torch.testing.assert_close(got.double(), each.double().sum(1), **close)


@pytest.mark.parametrize(("batch", "length", "width"), [(8, 1024, 2048), (16, 256, 768), (1, 5000, 300), (3, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_gradients(batch: int, length: int, width: int, dtype: torch.dtype) -> None:
    g, x, weight = rows(batch, length, width, dtype=dtype), rows(batch, length, width), rows(width)
    got = rms_norm_gradients(g, x, weight, 1e-6, backend="triton")
    wide = (g.double(), x.double(), weight.double())
    for found, expected in zip(got, rms_norm_gradients(*wide, 1e-6), strict=True):
        assert found is not None and expected is not None
        rounding = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=2 * rounding + 1e-5, atol=1e-5 * length**0.5)


# -- noise and update --------------------------------------------------------------------------------------------------


def test_the_noise_stream_is_that_of_torch_operators() -> None:
    """Rounding of ln, sin and cos differs in last places."""
    for seed, offset, first in ((0, 0, 0), (2**63 + 5, 7, 4), (-3, 2**40 + 1, 2**36)):
        got = noise_values((100_003,), seed, offset, "cuda", first=first)
        expected = noise_values((100_003,), seed, offset, first=first, backend="torch")
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=1e-5)


def test_ten_million_normals() -> None:
    z = noise_values((10_000_000,), 1, 1, "cuda").double()
    assert z.isfinite().all()
    assert abs(z.mean()) < 5e-4 * 3.2
    assert abs(z.var() - 1) < 5e-4 * 4.5
    assert 4.8 < z.abs().max() < 6.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_noise(dtype: torch.dtype) -> None:
    before = [rows(*shape, dtype=dtype) for shape in ((300, 1000), (7,), (16384 * 3,))]
    after = [tensor.clone() for tensor in before]
    add_noise_(after, 2.0, 0.25, 9, 4)
    for old, new, first in zip(before, after, noise_starts(before), strict=True):
        expected = ((old.float() + 2.0 * noise_values(old.shape, 9, 4, "cuda", first=first)) * 0.25).to(dtype)
        torch.testing.assert_close(new, expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_fused_step_is_that_of_torch_optim(kind: type[torch.optim.Optimizer]) -> None:
    """Many tensors, aligned and not, over several steps, with noise."""
    shapes = [(1000, 513), (64,), (7,), (40000,), (1,)] * 3
    params = [rows(*shape, dtype=torch.float32) for shape in shapes]
    sums = [[rows(*shape, dtype=torch.float32) for shape in shapes] for _ in range(3)]
    gradients = [
        [
            (s + 0.5 * noise_values(s.shape, 5, step, "cuda", first=first)) * 0.25
            for s, first in zip(step_sums, noise_starts(step_sums), strict=True)
        ]
        for step, step_sums in enumerate(sums)
    ]
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    if kind is torch.optim.SGD:
        options["momentum"] = 0.9
    expected = reference.optimizer_step(kind, params, gradients, **options)
    state = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    common: dict[str, Any] = {"grad_scale": 0.25, "noise_std": 0.5, "seed": 5, "backend": "triton"}
    for step, step_sums in enumerate(sums):
        if kind is torch.optim.SGD:
            fused_sgd_(params, step_sums, state[0], offset=step, first_step=step == 0, **common, **options)
        else:
            decoupled = kind is torch.optim.AdamW
            fused_adam_(
                params,
                step_sums,
                *state,
                step=step + 1,
                offset=step,
                decoupled_weight_decay=decoupled,
                **common,
                **options,
            )
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-6)


# -- all ---------------------------------------------------------------------------------------------------------------


def calls() -> dict[str, Callable[[], object]]:
    one, embedding = unit(4, 256, [256], [256]), torch.randint(0, 9, (4, 256), device="cuda")
    g, x, scale = rows(4, 256, 256), rows(4, 256, 128), torch.rand(4, device="cuda")
    params = [rows(1000, dtype=torch.float32), rows(7, dtype=torch.float32)]
    state = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    kept = [rows(4, 1000), rows(4, 7)]
    return {
        "gram_norms": lambda: gram_norms_squared([one, GramUnit(ids=embedding, gs=(g,))]),
        "scaled_sums": lambda: scaled_sums([g, g], [x, x], scale),
        "sample_sums": lambda: layer_norm_sums(g, g, g[:, :, 0], g[:, :, 0]),
        "rms_norm": lambda: rms_norm_gradients(g, g, g[0, 0], 1e-6),
        "add_noise": lambda: add_noise_(params, 1.0, 1.0, 0, 0),
        "fused_adam": lambda: fused_adam_(params, params, *state, step=1, lr=0.1, noise_std=1.0),
        "fused_adam of samples": lambda: fused_adam_(params, kept, *state, step=1, lr=0.1, factors=scale),
        "kept_norms": lambda: kept_norms_squared(kept),
        "kept_sums": lambda: kept_sums(kept, scale, outs=[params[0], None]),
    }


CALLS = [
    *("gram_norms", "scaled_sums", "sample_sums", "add_noise"),
    *("fused_adam", "fused_adam of samples", "kept_norms", "kept_sums"),
]


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits_for_the_device(name: str, request: pytest.FixtureRequest) -> None:
    call = calls()[name]
    call()  # compiling may wait
    torch.cuda.synchronize()
    request.getfixturevalue("nothing_synchronises")
    call()

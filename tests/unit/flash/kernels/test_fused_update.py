"""fused_sgd_ and fused_adam_ do what torch.optim does with (sum + noise)·scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.tensor_lists import noise_starts
from dpscope.vocabulary.phases import Launch, hearing
from tests.unit.flash.kernels import kernel_references as reference
from tests.unit.flash.kernels.noise_values import noise_values

SHAPES = [(13, 7), (1100,), (5,), (4, 3, 2)]  # the second is more than a block
LARGE = [(13, 7), (17000,), (5,)]  # the second is more than a chunk
STEPS = 2

# The same few float32 operations in another order: a few roundings of 6e-8 on values near one.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def fresh(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def zeros(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def noisy(sums: list[Tensor], std: float, scale: float, seed: int, offset: int) -> list[Tensor]:
    """What the update should see, with the noise materialised."""
    return [
        (s.float() + std * noise_values(s.shape, seed, offset, first=first, backend="torch")) * scale
        for s, first in zip(sums, noise_starts(sums), strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "noise_std", "shapes"),
    [
        ({}, 0.0, SHAPES),
        ({"momentum": 0.9}, 0.7, LARGE),
        ({"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}, 0.0, SHAPES),
        ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 0.0, SHAPES),
        ({"weight_decay": 0.1, "maximize": True}, 0.7, SHAPES),
    ],
)
def test_sgd(options: dict[str, Any], noise_std: float, shapes: list[tuple[int, ...]], backend: str) -> None:
    params, sums = fresh(shapes=shapes), [fresh(shapes=shapes) for _ in range(STEPS)]
    expected = reference.optimizer_step(
        torch.optim.SGD,
        params,
        [noisy(s, noise_std, 0.25, 5, step) for step, s in enumerate(sums)],
        lr=0.1,
        **options,
    )
    buffers = [torch.full(shape, torch.nan) for shape in shapes] if "momentum" in options else []
    for step, s in enumerate(sums):
        fused_sgd_(
            params,
            s,
            buffers,
            lr=0.1,
            first_step=step == 0,
            grad_scale=0.25,
            noise_std=noise_std,
            seed=5,
            offset=step,
            backend=backend,
            **options,
        )
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("options", "noise_std", "shapes"),
    [
        ({}, 0.0, SHAPES),
        ({"weight_decay": 0.1}, 0.7, LARGE),
        ({"amsgrad": True, "weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-3}, 0.0, SHAPES),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    noise_std: float,
    shapes: list[tuple[int, ...]],
    backend: str,
) -> None:
    params, sums = fresh(shapes=shapes), [fresh(shapes=shapes) for _ in range(STEPS)]
    decay = {"weight_decay": options.get("weight_decay", 0.0)}
    expected = reference.optimizer_step(
        kind,
        params,
        [noisy(s, noise_std, 0.25, 5, step) for step, s in enumerate(sums)],
        lr=0.01,
        **{**options, **decay},
    )
    exp_avgs, exp_avg_sqs, maxima = (
        zeros(shapes=shapes) if needed else [] for needed in (True, True, "amsgrad" in options)
    )
    for step, s in enumerate(sums):
        fused_adam_(
            params,
            s,
            exp_avgs,
            exp_avg_sqs,
            maxima,
            step=step + 1,
            lr=0.01,
            decoupled_weight_decay=kind is torch.optim.AdamW,
            grad_scale=0.25,
            noise_std=noise_std,
            seed=5,
            offset=step,
            backend=backend,
            **options,
        )
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(("noise_std", "floor"), [(0.7, 5e-8), (0.0, 0.2)])
def test_dp_adam_bc(decoupled: bool, noise_std: float, floor: float, backend: str) -> None:
    """The formula of Tang et al. 2023, in float64; the variance of the noise is above some v̂ and below others."""
    params, sums = fresh(), [fresh() for _ in range(STEPS)]
    lr, decay, betas, scale = 0.01, 0.1, (0.8, 0.9), 0.25
    expected = [param.double() for param in params]
    first, second = ([torch.zeros_like(param) for param in expected] for _ in range(2))
    floored = []
    for step, total in enumerate(sums):
        for i, private in enumerate(noisy(total, noise_std, scale, 5, step)):
            g = private.double() + (0.0 if decoupled else decay * expected[i])
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g**2
            unbiased = second[i] / (1 - betas[1] ** (step + 1)) - (noise_std * scale) ** 2
            floored.append((unbiased < floor).flatten())
            move = first[i] / (1 - betas[0] ** (step + 1)) / unbiased.clamp(min=floor).sqrt()
            expected[i] = (1 - lr * decay if decoupled else 1.0) * expected[i] - lr * move
    exp_avgs, exp_avg_sqs = zeros(), zeros()
    for step, total in enumerate(sums):
        fused_adam_(
            params, total, exp_avgs, exp_avg_sqs,
            step=step + 1, lr=lr, betas=betas, weight_decay=decay, decoupled_weight_decay=decoupled, floor=floor,
            grad_scale=scale, noise_std=noise_std, seed=5, offset=step, backend=backend,
        )  # fmt: skip
    assert 0 < torch.cat(floored).float().mean() < 1
    for got, wanted in zip(params, expected, strict=True):
        # v̂ less the variance cancels, where it is near the floor: an epsilon of float32 in v̂ is then many of the rest.
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-4)


def test_bfloat16_parameters_are_rounded_once(backend: str) -> None:
    """Against the same step in float32, rounded at the end: equal but for values on the edge of a rounding."""
    params, sums = fresh(torch.bfloat16), fresh()
    exact = [param.float() for param in params]
    state = {"step": 1, "lr": 0.01, "grad_scale": 0.5, "noise_std": 0.3, "seed": 1, "offset": 2}
    fused_adam_(exact, sums, zeros(), zeros(), backend="torch", **state)
    fused_adam_(params, sums, zeros(), zeros(), backend=backend, **state)
    for got, wanted in zip(params, exact, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, wanted.bfloat16(), rtol=2**-7, atol=1e-6)
        if backend == "torch" and got.numel() > 100:  # the interpreter truncates where a GPU rounds to nearest
            assert (got == wanted.bfloat16()).float().mean() > 0.98


def test_bfloat16_state(backend: str) -> None:
    params, sums = fresh(torch.bfloat16), fresh()
    exp_avgs, exp_avg_sqs = zeros(torch.bfloat16), zeros(torch.bfloat16)
    fused_adam_(params, sums, exp_avgs, exp_avg_sqs, step=1, lr=0.01, backend=backend)
    for s, m, v in zip(sums, exp_avgs, exp_avg_sqs, strict=True):
        torch.testing.assert_close(m, (0.1 * s).bfloat16(), rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(v, (0.001 * s * s).bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_per_sample_gradients_step_as_their_clipped_sum_does(
    kind: str, dtype: torch.dtype, batch: int, backend: str
) -> None:
    """One pass over stored gradients, against the same step on their sum. float64 factors, as norms are."""
    factors = torch.rand(batch, dtype=torch.float64)
    shapes = LARGE if batch == 3 else SHAPES
    values = [torch.randn(batch, *shape).to(dtype) for shape in shapes]
    params = fresh(shapes=shapes)
    expected = [param.clone() for param in params]
    common = {"lr": 0.1, "noise_std": 0.7, "grad_scale": 0.25, "seed": 5, "backend": backend}
    sums = [reference.kept_sum(v, factors).float() for v in values]
    for targets, given, options in ((expected, sums, {}), (params, values, {"factors": factors})):
        if kind == "sgd":
            fused_sgd_(targets, given, **common, **options)
        else:
            # eps: Adam's first step is the gradient's sign but for it, and a sign magnifies rounding near zero.
            moments = (zeros(shapes=shapes), zeros(shapes=shapes))
            fused_adam_(targets, given, *moments, step=1, eps=0.1, **common, **options)
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_each_parameter_may_have_factors_of_its_own(kind: str, backend: str) -> None:
    factors, rows = torch.rand(3, 2), [index % 3 for index in range(len(SHAPES))]
    values, params = [torch.randn(2, *shape) for shape in SHAPES], fresh()
    expected = [param.clone() for param in params]
    sums = [reference.kept_sum(v, factors[row]).float() for v, row in zip(values, rows, strict=True)]
    for targets, given, options in ((expected, sums, {}), (params, values, {"factors": factors, "factor_rows": rows})):
        if kind == "sgd":
            fused_sgd_(targets, given, lr=0.1, noise_std=0.7, backend=backend, **options)
        else:
            moments = (zeros(), zeros())
            fused_adam_(targets, given, *moments, step=1, lr=0.1, eps=0.1, noise_std=0.7, backend=backend, **options)
    for got, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("left_out", [0.0, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_samples_without_a_factor_leave_the_step_to_the_others_and_the_noise(
    left_out: float, dtype: torch.dtype, backend: str
) -> None:
    """Their gradients hold NaN and inf. float64 takes the fallback."""
    wide = dtype if dtype == torch.float64 else torch.float32
    params = zeros(wide)
    values = [torch.ones(3, *shape, dtype=dtype) for shape in SHAPES]
    for v in values:
        v[0], v[2] = torch.nan, torch.inf
    fused_sgd_(
        params,
        values,
        lr=1.0,
        noise_std=2.0,
        grad_scale=0.5,
        seed=3,
        offset=1,
        factors=torch.tensor([left_out, 0.5, left_out]),
        backend="torch" if dtype == torch.float64 else backend,
    )
    for param, noise in zip(params, noisy(zeros(), 2.0, 0.5, 3, 1), strict=True):
        torch.testing.assert_close(param.float(), -(noise + 0.25), rtol=0, atol=1e-5)


def test_stored_gradients_that_are_not_contiguous_take_the_same_kernel(backend: str) -> None:
    """As those of a class token, one position of many."""
    values, factors = torch.randn(3, 5, 8)[:, 2], torch.tensor([0.5, 0.0, 2.0])
    param = torch.zeros(8)
    fused_sgd_([param], [values], lr=1.0, factors=factors, backend=backend)
    torch.testing.assert_close(param, -reference.kept_sum(values, factors).float(), **CLOSE)


def test_factors_are_one_floating_point_number_a_sample() -> None:
    for factors in (torch.ones(2), torch.ones(()), torch.ones(1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one floating-point factor a sample"):
            fused_sgd_([torch.zeros(4)], [torch.ones(1, 4)], lr=0.1, factors=factors)


def test_the_sums_are_left_alone(backend: str) -> None:
    params, sums, values = fresh(), fresh(), [torch.randn(2, *shape) for shape in SHAPES]
    before = [each.clone() for each in (*sums, *values)]
    fused_sgd_(params, sums, lr=0.1, noise_std=1.0, grad_scale=0.5, backend=backend)
    fused_sgd_(params, values, lr=0.1, noise_std=1.0, factors=torch.tensor([0.5, 0.0]), backend=backend)
    assert all(torch.equal(now, then) for now, then in zip((*sums, *values), before, strict=True))


def test_noise_alone_makes_a_step(backend: str) -> None:
    """An empty batch: the sums are zero, and the parameters move by the noise."""
    params = zeros()
    fused_sgd_(params, zeros(), lr=1.0, noise_std=2.0, grad_scale=0.5, seed=3, offset=1, backend=backend)
    for param, noise in zip(params, noisy(zeros(), 2.0, 0.5, 3, 1), strict=True):
        torch.testing.assert_close(param, -noise, rtol=0, atol=1e-5)


def test_two_steps_draw_different_noise(backend: str) -> None:
    first, second = zeros(), zeros()
    fused_sgd_(first, zeros(), lr=1.0, noise_std=1.0, seed=3, offset=1, backend=backend)
    fused_sgd_(second, zeros(), lr=1.0, noise_std=1.0, seed=3, offset=2, backend=backend)
    assert all((a != b).all() for a, b in zip(first, second, strict=True))


def test_parameters_of_mixed_dtype_keep_their_place_in_the_stream(backend: str) -> None:
    """They go into different launches; the noise is still that of the whole list."""
    params = [torch.zeros(9), torch.zeros(10, dtype=torch.bfloat16), torch.zeros(16)]
    sums = [torch.zeros(9), torch.zeros(10), torch.zeros(16)]
    fused_sgd_(params, sums, lr=1.0, noise_std=1.0, seed=3, offset=1, backend=backend)
    for param, noise in zip(params, noisy(sums, 1.0, 1.0, 3, 1), strict=True):
        torch.testing.assert_close(param.float(), -noise, rtol=2**-7, atol=1e-5)


def test_autograd_notices_the_change(backend: str) -> None:
    param = torch.nn.Parameter(torch.ones(8))
    loss = (param**2).sum()
    fused_sgd_([param], [torch.ones(8)], lr=0.1, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_layouts_and_float64_take_the_fallback() -> None:
    params = [torch.randn(6, 5).T, torch.randn(3, 3, dtype=torch.float64)]
    before = [param.clone() for param in params]
    sums = [torch.randn(5, 6), torch.randn(3, 3, dtype=torch.float64)]
    fused_sgd_(params, sums, lr=0.5)
    for param, old, s in zip(params, before, sums, strict=True):
        torch.testing.assert_close(param, old - 0.5 * s)


def test_empty_parameters_are_passed_over(backend: str) -> None:
    params = [torch.ones(0), torch.ones(9), torch.ones(0, 4)]
    fused_sgd_(params, [torch.ones_like(param) for param in params], lr=0.5, backend=backend)
    assert (params[1] == 0.5).all()


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one tensor a parameter"):
        fused_adam_(fresh(), fresh(), zeros(), zeros()[:2], step=1, lr=0.1)
    with pytest.raises(ValueError, match="shapes differ"):
        fused_sgd_([torch.zeros(3)], [torch.zeros(4)], lr=0.1)
    with pytest.raises(ValueError, match="momentum_buffers"):
        fused_sgd_(fresh(), fresh(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="max_exp_avg_sqs"):
        fused_adam_(fresh(), fresh(), zeros(), zeros(), step=1, lr=0.1, amsgrad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_in_another_memory_order_take_the_same_kernel(dtype: torch.dtype, backend: str) -> None:
    """channels_last: their noise made by torch would be dozens of small kernels for each weight."""
    if dtype == torch.float64 and backend == "triton":
        pytest.skip("no kernel serves float64")
    shapes = [(4, 3, 2, 5), (13, 7)]
    params, sums = fresh(dtype, shapes), fresh(dtype, shapes)
    twins = [param.clone() for param in params]
    params[0] = params[0].to(memory_format=torch.channels_last)
    states = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    plain = [[torch.zeros_like(param) for param in twins] for _ in range(2)]
    assert not params[0].is_contiguous()
    how: dict[str, Any] = {"step": 1, "lr": 0.1, "noise_std": 0.7, "grad_scale": 0.25, "seed": 5, "offset": 3}
    launches: list[Launch] = []
    with hearing(launches.append):
        fused_adam_(params, sums, *states, **how, backend=backend)
    fused_adam_(twins, sums, *plain, **how, backend=backend)
    for found, wanted in zip([params, *states], [twins, *plain], strict=True):
        for tensor, twin in zip(found, wanted, strict=True):
            torch.testing.assert_close(tensor, twin)
    assert params[0].is_contiguous(memory_format=torch.channels_last)
    assert sum(len(launch.writes) for launch in launches) == (6 if backend == "triton" else 0)

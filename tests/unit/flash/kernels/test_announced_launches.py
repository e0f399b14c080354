"""Every Triton kernel says what it moves, and what it says is what its tensors hold."""

from __future__ import annotations

import pytest
import torch

from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.kernels.kept_gradients import kept_norms_squared, kept_sums
from dpscope.flash.kernels.noise import add_noise_
from dpscope.flash.kernels.sample_sums import layer_norm_sums
from dpscope.flash.kernels.scaled_sum import scaled_sums
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import hearing
from tests.torch_here import takes_descriptors

B, T, D, P = 2, 16, 32, 16


@pytest.fixture
def heard():
    launches = []
    with hearing(launches.append):
        yield launches


@pytest.fixture(autouse=True)
def only_triton(backend):
    """Plain torch is seen by any dispatch mode and announces nothing."""
    if backend != "triton":
        pytest.skip("kernels run in the interpreter's process")


def holds(tensors, *expected):
    return sorted(t.data_ptr() for t in tensors) == sorted(t.data_ptr() for t in expected)


def test_gram_norms(heard, backend):
    g, x = torch.randn(B, T, P), torch.randn(B, T, D)
    gram_norms_squared([GramUnit((g,), (x,))], backend=backend)
    launch, finish = heard
    assert (finish.name, finish.family) == ("_gram_finish_kernel", phases.CLIPPING)
    assert (launch.name, launch.family) == ("_gram_kernel", phases.CLIPPING)
    assert holds(launch.reads, g, x)
    assert launch.flops == 2 * B * (T * (T + 1) // 2) * (D + P)


def test_gram_norms_of_an_embedding(heard, backend):
    g, ids = torch.randn(B, T, P), torch.randint(9, (B, T))
    gram_norms_squared([GramUnit((g,), ids=ids)], backend=backend)
    launch, _ = heard
    assert launch.name == "_gram_ids_kernel"
    assert holds(launch.reads, g, ids)


def test_sample_sums(heard, backend):
    g, x, mean, rstd = torch.randn(B, T, D), torch.randn(B, T, D), torch.randn(B, T), torch.rand(B, T)
    layer_norm_sums(g, x, mean, rstd, backend=backend)
    (launch,) = heard
    assert (launch.name, launch.family) == ("_sums_kernel", phases.CLIPPING)
    assert holds(launch.reads, g, x, mean, rstd)
    assert sum(t.numel() for t in launch.writes) == 2 * B * D


@takes_descriptors
def test_scaled_sums(heard, backend):
    gs = [torch.randn(B, T, P).bfloat16() for _ in range(2)]
    xs = [torch.randn(B, T, D).bfloat16() for _ in range(2)]
    scale = torch.rand(B)
    outs = scaled_sums(gs, xs, scale, backend=backend)
    (launch,) = heard
    assert (launch.name, launch.family) == ("_scaled_sum_kernel", phases.GEMM)
    assert holds(launch.reads, *gs, *xs, scale)
    assert holds(launch.writes, *outs)
    assert launch.flops == 2 * (2 * B * T * P * D)


@takes_descriptors
def test_scaled_sums_that_are_added_to_read_what_they_add_to(heard, backend):
    g, x, scale = torch.randn(B, T, P).bfloat16(), torch.randn(B, T, D).bfloat16(), torch.rand(B)
    out = torch.zeros(P, D)
    scaled_sums([g], [x], scale, outs=[out], backend=backend)
    assert holds(heard[0].reads, g, x, scale, out)


def test_kept_gradients(heard, backend):
    values, factors, out = torch.randn(B, 16), torch.rand(B), torch.zeros(16)
    kept_norms_squared([values], backend=backend)
    kept_sums([values], factors, outs=[out], backend=backend)
    (fresh,) = kept_sums([values], factors, backend=backend)
    norms, added, made = heard
    assert [(launch.name, launch.family) for launch in heard] == [
        ("_kept_norms_kernel", phases.CLIPPING),
        *[("_kept_sums_kernel", phases.CLIPPING)] * 2,
    ]
    assert holds(norms.reads, values)
    assert holds(added.reads, values, factors, out)
    assert holds(added.writes, out)
    assert holds(made.reads, values, factors)
    assert holds(made.writes, fresh)


def test_noise(heard, backend):
    tensors = [torch.randn(10), torch.randn(20)]
    add_noise_(tensors, 1.0, 1.0, seed=0, offset=0, backend=backend)
    assert [(launch.name, launch.family) for launch in heard] == [("_add_noise_kernel", phases.NOISE_FAMILY)] * len(
        heard
    )
    assert holds([t for launch in heard for t in launch.reads], *tensors)
    assert holds([t for launch in heard for t in launch.writes], *tensors)


def test_updates(heard, backend):
    param, total, first, second = (torch.rand(16) for _ in range(4))
    fused_adam_([param], [total], [first], [second], step=1, lr=0.1, backend=backend)
    fused_sgd_([param], [total], lr=0.1, backend=backend)
    adam, sgd = heard
    assert (adam.name, adam.family) == ("_adam_kernel", phases.OPTIMIZER_FAMILY)
    assert holds(adam.reads, param, total, first, second)
    assert holds(adam.writes, param, first, second)
    assert sgd.name == "_sgd_kernel"
    assert holds(sgd.reads, param, total)
    assert holds(sgd.writes, param)


def test_an_update_that_sums_reads_every_samples_gradient(heard, backend):
    param, values, factors = torch.rand(16), torch.rand(B, 16), torch.rand(B)
    fused_sgd_([param], [values], lr=0.1, factors=factors, backend=backend)
    assert holds(heard[0].reads, param, values, factors)

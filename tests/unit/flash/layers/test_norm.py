"""LayerNorm, RMSNorm, GroupNorm, InstanceNorm: affine parameters and the gradient that passes through."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpscope.flash.kernels.rms_norm import rms_norm_gradients
from dpscope.flash.kernels.sample_sums import layer_norm_sums
from dpscope.flash.layers import norm
from dpscope.flash.taps.recorder import Recorder
from tests.unit.flash.agreement import CLIPPING, REDUCTIONS, assert_exact
from tests.unit.flash.flash_models import LlamaRMSNorm, randomised


def sine_losses(model, batch):
    return (model(batch["x"]) * 1.7).sin().flatten(1).sum(1)


def over_features(kind: str, width: int) -> nn.Module:
    return {
        "LayerNorm": lambda: nn.LayerNorm(width),
        "LayerNorm without bias": lambda: nn.LayerNorm(width, bias=False),
        "RMSNorm": lambda: nn.RMSNorm(width),
        "RMSNorm with eps": lambda: nn.RMSNorm(width, eps=0.1),
        "LlamaRMSNorm": lambda: LlamaRMSNorm(width),
    }[kind]()


@pytest.mark.parametrize("kind", ["LayerNorm", "LayerNorm without bias", "RMSNorm", "RMSNorm with eps", "LlamaRMSNorm"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 4),
    middle=st.lists(st.integers(1, 4), max_size=2),
    width=st.integers(4, 8),  # of two or three features a norm leaves next to nothing but rounding
    clipping=st.sampled_from(CLIPPING),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_norms_over_features(kind, batch, middle, width, clipping, reduction, dtype):
    model = nn.Sequential(nn.Linear(3, width), randomised(over_features(kind, width)), nn.Linear(width, 2)).to(dtype)
    batch = {"x": torch.randn(batch, *middle, 3, dtype=dtype)}
    engine = assert_exact(model, batch, sine_losses, clipping=clipping, loss_reduction=reduction)
    assert "opaque" not in {row.kind for row in engine.explain()}


@pytest.mark.parametrize("kind", ["LayerNorm", "LayerNorm without bias", "RMSNorm", "several dimensions", "used twice"])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
def test_sums_of_stretches_are_added_up_when_the_micro_batch_is_closed(kind, frozen, monkeypatch):
    """As a kernel gives them where there are many positions."""
    seen = []

    def in_stretches(sums):
        def of_halves(g, x, *statistics, whole):
            seen.append(whole)
            rows = (g, x, *(each.view(g.shape[:2]) for each in statistics))
            halves = [sums(*(each[:, part] for each in rows)) for part in (slice(0, 2), slice(2, None))]
            joined = torch.stack([torch.stack(half) if isinstance(half, tuple) else half for half in halves], -2)
            return joined.sum(-2) if whole else joined

        return of_halves

    monkeypatch.setattr(Recorder, "layer_norm_sums", staticmethod(in_stretches(layer_norm_sums)))

    def rms_in_stretches(g, x, weight, eps, *, whole, **needed):
        seen.append(whole)
        dx, sums = rms_norm_gradients(g, x, weight, eps, **needed)
        parts = [rms_norm_gradients(g[:, part], x[:, part], weight, eps)[1] for part in (slice(0, 2), slice(2, None))]
        return dx, sums if whole or sums is None else torch.stack(parts, -2)

    monkeypatch.setattr(Recorder, "rms_norm_gradients", staticmethod(rms_in_stretches))
    twice, wide = kind == "used twice", kind == "several dimensions"
    layer = randomised(nn.LayerNorm((2, 4)) if wide else nn.LayerNorm(4) if twice else over_features(kind, 4))
    for name in frozen:
        if getattr(layer, name, None) is not None:
            getattr(layer, name).requires_grad_(False)
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 4), *([layer] if twice else []))
    shape = (5, 6, 2, 3) if wide else (5, 6, 3)
    assert_exact(model, {"x": torch.randn(shape)}, sine_losses)
    if any(parameter.requires_grad for parameter in layer.parameters()):
        assert set(seen) == {wide}


def test_layer_norm_over_several_dimensions():
    model = nn.Sequential(nn.Linear(4, 4), randomised(nn.LayerNorm((3, 4))))
    assert_exact(model, {"x": torch.randn(5, 2, 3, 4)}, sine_losses)
    assert_exact(model, {"x": torch.randn(5, 3, 4)}, sine_losses)


INSTANCE_NORMS = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


@pytest.mark.parametrize("kind", ["group", "instance"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 4),
    spatial=st.lists(st.integers(4, 5), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    clipping=st.sampled_from(CLIPPING),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_norms_over_channels(kind, batch, spatial, groups, each, clipping, reduction, dtype):
    channels, n = groups * each, len(spatial)
    norm = nn.GroupNorm(groups, channels) if kind == "group" else INSTANCE_NORMS[n - 1](channels, affine=True)
    model = nn.Sequential(
        CONVOLUTIONS[n - 1](2, channels, 1, bias=False),
        randomised(norm),
        nn.ReLU(inplace=True),
        CONVOLUTIONS[n - 1](channels, 2, 1),
    ).to(dtype)
    batch = {"x": torch.randn(batch, 2, *spatial, dtype=dtype)}
    assert_exact(model, batch, sine_losses, clipping=clipping, loss_reduction=reduction)


@pytest.mark.parametrize("affine", [True, False])
def test_more_groups_in_a_batch_than_a_launch_takes(affine, monkeypatch):
    monkeypatch.setattr(norm, "MOST_GROUPS", 5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), randomised(nn.GroupNorm(2, 4, affine=affine)), nn.Conv2d(4, 2, 1))
    assert_exact(model, {"x": torch.randn(3, 3, 5, 6)}, sine_losses)


def test_group_norm_of_vectors_and_of_channels_last_images():
    assert_exact(nn.Sequential(nn.Linear(3, 6), randomised(nn.GroupNorm(2, 6))), {"x": torch.randn(4, 3)}, sine_losses)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), randomised(nn.GroupNorm(2, 4)))
    x = torch.randn(3, 3, 6, 5).to(memory_format=torch.channels_last)
    assert_exact(model, {"x": x}, sine_losses)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_frozen_half_of_a_norm(frozen):
    model = nn.Sequential(nn.Linear(3, 4), randomised(nn.LayerNorm(4)))
    getattr(model[1], frozen).requires_grad_(False)
    assert_exact(model, {"x": torch.randn(4, 3)}, sine_losses)

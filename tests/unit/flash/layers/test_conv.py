"""Convolutions: every geometry torch knows, on every path."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.gradients.paths import KEEP, Decision
from dpscope.flash.kernels import triton_runtime
from dpscope.flash.layers.conv import Geometry, Patches, _options, setting_of
from tests.unit.flash.agreement import CLIPPING, PATHS, REDUCTIONS, assert_exact
from tests.unit.flash.flash_models import sine_losses

CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2, 3])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    data=st.data(),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    padding=st.sampled_from([0, 1, 2, "same", "valid"]),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding_mode=st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]),
    bias=st.booleans(),
    clipping=st.sampled_from(CLIPPING),
    reduction=st.sampled_from(REDUCTIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_geometry(
    path, n, data, batch, groups, padding, stride, dilation, padding_mode, bias, clipping, reduction, dtype
):
    assume(not (padding == "same" and stride > 1))
    assume(not (padding == 2 and padding_mode == "reflect"))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(n)]
    size = [data.draw(st.integers(5, 6)) for _ in range(n)]
    inner, outer = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    layer = CONVOLUTIONS[n - 1](
        inner,
        outer,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        padding_mode=padding_mode,
    )
    model = nn.Sequential(CONVOLUTIONS[n - 1](2, inner, 1), nn.Tanh(), layer).to(dtype)
    batch = {"x": torch.randn(batch, 2, *size, dtype=dtype)}
    assert_exact(model, batch, sine_losses, clipping=clipping, loss_reduction=reduction, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_a_convolution_used_twice_with_an_inplace_relu_after_it(path):
    layer = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(layer, nn.ReLU(inplace=True), layer, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(50, 2))
    assert_exact(model, {"x": torch.randn(3, 2, 5, 5)}, sine_losses, path=path)


@pytest.mark.parametrize("path", ["gram", "direct", "keep"])
@pytest.mark.parametrize("groups", [1, 2])
def test_patches_made_a_sample_at_a_time_give_the_same(path, groups, monkeypatch):
    monkeypatch.setattr(triton_runtime, "SCRATCH_BYTES", 1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=groups), nn.Tanh(), nn.Conv2d(4, 2, 2))
    assert_exact(model, {"x": torch.randn(4, 2, 5, 5)}, sine_losses, path=path)


def test_channels_last_images():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 8, 7).to(memory_format=torch.channels_last)
    for path in PATHS:
        assert_exact(model, {"x": x}, sine_losses, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("groups", [1, 2])
def test_bfloat16_norms_are_those_of_the_very_values_that_are_summed(path, groups):
    """Equal elements that round in one direction: a norm of exact gradients beside a sum of rounded ones shows."""
    model, c = nn.Sequential(nn.Conv1d(8, 8, 3, groups=groups, bias=False)), 1e-3
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum") as engine:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.full((2, 8, 7), 1.0078125))
        (output * 1.0078125).float().sum().backward()
        engine.finish()
    assert model[0].weight.grad.norm() == pytest.approx(2 * c, rel=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_of_one_element_needs_no_copy_of_its_input(layout):
    x = torch.randn(2, 3, 4, 5).to(memory_format=layout)
    patches = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1).unfold(x, (4, 5))
    assert patches.data_ptr() == x.data_ptr()
    assert torch.equal(patches, x.flatten(2))


def test_patches_are_those_of_torch():
    x = torch.randn(2, 3, 7, 6)
    patches = Geometry((3, 2), (2, 1), (1, 0), (1, 2), 1).unfold(x, (4, 4))
    assert torch.equal(patches, nn.functional.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}])
def test_depthwise_gradients_are_those_of_unfolded_patches(n, multiplier, options):
    layer = CONVOLUTIONS[n - 1](3, 3 * multiplier, 3, groups=3, **options)
    x = torch.randn(4, 3, *[7, 6, 5][:n])
    g = torch.randn_like(layer(x))
    geometry = setting_of(_options(layer)).geometry
    patches = Patches(x, g, geometry, tuple(layer.weight.shape), Decision(KEEP, ""))
    unfolded = patches._outer(slice(None)).materialise().view(4, *layer.weight.shape)
    torch.testing.assert_close(patches.materialise(), unfolded, rtol=1e-5, atol=1e-5)

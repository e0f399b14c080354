"""Per-sample gradients of convolutions without patches: values, norms, products with a basis, and clipped sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import FlashEngine
from dpscope.flash.kernels import conv_products as module
from dpscope.flash.kernels.conv_products import (
    ConvProduct,
    ConvTiles,
    Geometry,
    conv_norms,
    conv_products,
    conv_sum,
    conv_sums,
    default_tiles,
    serves_conv,
)
from dpscope.flash.layers import conv as layer
from dpscope.flash.layers.row_derivatives import Derived
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import hearing
from tests.unit.flash.agreement import CLIPPING, PATHS, assert_exact
from tests.unit.flash.flash_models import sine_losses
from tests.unit.flash.kernels.conv_cases import CASES, exact, operands

TILES = [None, ConvTiles(16, 32, 16, 1, 1)]


@pytest.fixture
def kernels(backend: str) -> None:
    if backend != "triton":
        pytest.skip("the kernels have no other backend: callers unfold patches")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", CASES)
def test_values_norms_and_sums_are_those_of_autograd(name: str, tiles: ConvTiles | None) -> None:
    x, g, geometry, shape = operands(name)
    truth = exact(x, g, geometry, shape)
    product = ConvProduct(x, g, geometry, in_tf32=False, tiles=tiles)
    values, parts = conv_products(product, torch.float32)
    torch.testing.assert_close(values.view_as(truth).double(), truth, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(parts.sum(1), values.double().square().sum((1, 2)), rtol=2e-6, atol=0)
    assert torch.equal(conv_products(product, None)[1], parts)
    scale = torch.tensor([0.25, 3.0, 1e-6])
    torch.testing.assert_close(
        conv_sum(product, scale).view(shape).double(), torch.einsum("b,b...->...", scale.double(), truth),
        rtol=1e-5, atol=5e-5,
    )  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("turns", [0, 2000])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CASES)
def test_convolutions_that_share_launches_give_what_each_gives_alone(
    name: str, layout: torch.memory_format, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURNS", turns)
    module._plan.cache_clear()
    others = "three by three" if name != "three by three" else "one element"
    products = []
    for case in (name, others, name, name):
        x, g, geometry, _ = operands(case)
        if x.dim() == 4:
            x, g = (each.to(memory_format=layout) for each in (x, g))
        products.append(ConvProduct(x, g, geometry, in_tf32=False))
    launches = []
    with hearing(launches.append):
        norms = conv_norms(products)
    made = [launch.name for launch in launches if "copy" not in launch.name]
    in_order = all(operand.is_contiguous() for operand in products[0][:2])
    assert len(made) == (2 if in_order else 4)  # others are copied first, one by one
    scale = torch.tensor([0.5, 2.0, 3.0])
    sums = conv_sums([*products], scale)
    for product, squares, total in zip(products, norms, sums, strict=True):
        torch.testing.assert_close(squares.sum(1), conv_products(product, None)[1].sum(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(total, conv_sum(product, scale), rtol=1e-6, atol=1e-6)
    module._plan.cache_clear()


@pytest.mark.usefixtures("kernels")
def test_launches_are_shared_as_far_as_their_copies_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, geometry, _ = operands("three by three")
    product = ConvProduct(x, g, geometry, in_tf32=False)
    monkeypatch.setattr(module, "LEAST_COPIES", 2 * (product.plan(module.FOR_NORMS).held + 4 * g.shape[1] * 45))
    launches = []
    with hearing(launches.append):
        conv_norms([product] * 5)
    assert [len(launch.writes[0]) for launch in launches if "copy" not in launch.name] == [2, 2, 3]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["three by three", "odd"])
def test_sums_and_products_of_rows_are_those_of_the_stored_values(name: str) -> None:
    x, g, geometry, shape = operands(name)
    directions = torch.randn(shape[0], torch.Size(shape[1:]).numel())
    product = ConvProduct(x, g, geometry, in_tf32=False, tiles=ConvTiles(16, 32, 16, 1, 1))
    values, parts = conv_products(product, torch.float32, directions=directions)
    rows = values.double()
    expected = torch.stack([rows.square().sum(2), rows.sum(2), (rows * directions.double()).sum(2)], 1)
    torch.testing.assert_close(parts.sum(1), expected, rtol=1e-5, atol=1e-4)
    without_values = conv_products(product, None, directions=directions)[1]
    torch.testing.assert_close(without_values.sum(1), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["three by three", "groups of one", "several images"])
@pytest.mark.parametrize("turns", [1, 6, 1000])
def test_norms_do_not_depend_on_how_many_samples_a_program_makes(
    name: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURNS", turns)
    module._plan.cache_clear()
    x, g, geometry, _ = operands(name, batch=5)
    x[1] = torch.nan  # of one sample, and of no other
    product = ConvProduct(x, g, geometry, in_tf32=False, tiles=ConvTiles(16, 32, 16, 1, 1))
    values, _ = conv_products(product, torch.float32)
    directions = torch.randn(values.shape[1:])
    rows = values.double()
    expected = torch.stack([rows.square().sum(2), rows.sum(2), (rows * directions.double()).sum(2)], 1)
    parts = conv_products(product, None, directions=directions)[1].sum(1)
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
    alone = conv_products(product, None)[1].sum(1)
    torch.testing.assert_close(alone, rows.square().sum((1, 2)), rtol=2e-6, atol=0, equal_nan=True)
    assert alone.isnan().tolist() == [False, True, False, False, False]
    module._plan.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["one element", "three by three"])
def test_layouts_and_half_precision(name: str) -> None:
    """Norms are of the rounded values. (The interpreter truncates to bfloat16.)"""
    for layout in (torch.contiguous_format, torch.channels_last):
        x, g, geometry, shape = operands(name, dtype=torch.bfloat16)
        x, g = (each.to(memory_format=layout) for each in (x, g))
        values, parts = conv_products(ConvProduct(x, g, geometry, in_tf32=False), torch.bfloat16)
        torch.testing.assert_close(values.view(-1, *shape).double(), exact(x, g, geometry, shape), rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(parts.sum(1), values.double().square().sum((1, 2)), rtol=2e-6, atol=0)


@pytest.mark.usefixtures("kernels")
def test_every_finite_value_has_its_square() -> None:
    x, g, geometry, _ = operands("three by three", batch=5)
    sizes = torch.tensor([1e-17, 1e-12, 1.0, 1e12, 1e19])
    x, g = (each * sizes.view(-1, 1, 1, 1) for each in (x, g))
    values, parts = conv_products(ConvProduct(x[:4], g[:4], geometry, in_tf32=False), torch.float32)
    expected = values.double().square().sum((1, 2))
    assert (expected > 0).all()
    torch.testing.assert_close(parts.sum(1), expected, rtol=2e-6, atol=0)
    g[2, 0, 0, 0] = torch.nan
    g[1, 0, 0, 0] = torch.inf
    _, parts = conv_products(ConvProduct(x, g, geometry, in_tf32=False), None)
    assert parts.sum(1).isfinite().tolist() == [True, False, False, True, False]  # the last overflows float32


@pytest.mark.usefixtures("kernels")
def test_a_sample_without_a_factor_has_no_share_in_a_sum() -> None:
    x, g, geometry, shape = operands("three by three", batch=5)
    truth = exact(x, g, geometry, shape)
    x[1], g[3] = torch.nan, torch.inf
    scale = torch.tensor([1.0, 0.0, 2.0, torch.nan, 2.0**-101])
    total = conv_sum(ConvProduct(x, g, geometry, in_tf32=False), scale).view(shape)
    torch.testing.assert_close(total.double(), truth[0] + 2 * truth[2], rtol=1e-5, atol=5e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_a_sum_does_not_depend_on_how_the_batch_is_divided(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESSORS", programs)
    x, g, geometry, shape = operands("odd", batch=7)
    scale = torch.rand(7)
    total = conv_sum(ConvProduct(x, g, geometry, in_tf32=False), scale).view(shape)
    expected = torch.einsum("b,b...->...", scale.double(), exact(x, g, geometry, shape))
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=5e-5)


@pytest.mark.usefixtures("kernels")
def test_launches_are_announced() -> None:
    x, g, geometry, _ = operands("one element")
    heard = []
    with hearing(heard.append):
        product = ConvProduct(x, g, geometry, in_tf32=False)
        values, parts = conv_products(product, torch.float32)
        conv_sum(product, torch.rand(3))
    products, sums = heard
    assert (products.name, products.family) == ("_conv_products_kernel", phases.GEMM)
    assert [t.data_ptr() for t in products.writes] == [parts.data_ptr(), values.data_ptr()]
    assert products.flops == sums.flops == 2 * 3 * 35 * 6 * 9


class StandardisedConv(nn.Conv2d):
    def __init__(self, *sizes: int, gain: bool = False) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5) if gain else 1.0

    def derived(self) -> Tensor:
        flat = self.weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
        return self.gain * flat.view_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.derived(), self.bias, self.stride, self.padding)


class RolledGain(StandardisedConv):
    """The gain of one channel multiplies the next: its derivative is not one of rows."""

    def derived(self) -> Tensor:
        return self.gain.roll(1, 0) * self.weight


@pytest.fixture
def engines_use_kernels(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def serves(x: Tensor, g: Tensor, geometry: Geometry) -> bool:
        return x.dtype != torch.float64 and serves_conv(x, g, geometry, backend="triton")

    monkeypatch.setattr(layer, "serves_conv", serves)


@pytest.mark.usefixtures("engines_use_kernels")
@pytest.mark.parametrize("in_tf32", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_uses_the_kernels_is_exact(
    path: str | None, in_tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths differ where operands may be rounded; the interpreter rounds none."""
    monkeypatch.setattr(layer, "cudnn_in_tf32", lambda device, operator: in_tf32)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 4, 1, 2), nn.Conv2d(4, 4, 3, 1, 1, groups=2), nn.Tanh(),
        nn.Conv2d(4, 4, 3, 1, 1, groups=4),
    )  # fmt: skip
    engine = assert_exact(model, {"x": torch.randn(3, 2, 9, 7)}, sine_losses, path=path)
    if path == "gram":
        reason = engine.slot(model[0].weight).why
        assert ("gram was asked for" in str(reason)) is in_tf32


@pytest.mark.usefixtures("engines_use_kernels")
@pytest.mark.parametrize("path", ["direct", "keep"])
def test_gradients_of_a_derived_weight_are_never_made(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(StandardisedConv(3, 8, 3, 2, 1), nn.ReLU(), StandardisedConv(8, 4, 3, 1, 1, gain=True))
    monkeypatch.setattr(Derived, "materialise", None)
    monkeypatch.setattr(layer.Patches, "materialise", None)
    for clipping in CLIPPING if path == "direct" else CLIPPING[:1]:
        assert_exact(model, {"x": torch.randn(5, 3, 6, 5)}, sine_losses, path=path, clipping=clipping)


@pytest.mark.usefixtures("engines_use_kernels")
def test_a_derived_weight_that_is_used_twice() -> None:
    layer = StandardisedConv(4, 4, 3, 1, 1, gain=True)
    assert_exact(nn.Sequential(layer, nn.Tanh(), layer), {"x": torch.randn(5, 4, 4, 5)}, sine_losses)


@pytest.mark.usefixtures("engines_use_kernels")
def test_a_gain_of_another_derivative_is_exact_too() -> None:
    model = nn.Sequential(RolledGain(4, 4, 3, 1, 1, gain=True), nn.Tanh())
    assert_exact(model, {"x": torch.randn(5, 4, 4, 5)}, sine_losses)


def test_what_is_not_served(backend: str) -> None:
    x, g, geometry, _ = operands("three by three")
    assert serves_conv(x, g, geometry, backend=backend) is (backend == "triton")
    assert not serves_conv(x, g, geometry)  # on a CPU
    for no in ((x.double(), g.double()), (x, g.bfloat16()), (x[:0], g[:0])):
        if backend == "triton":
            with pytest.raises(ValueError, match="does not serve"):
                serves_conv(*no, geometry, backend=backend)
        else:
            assert not serves_conv(*no, geometry, backend=backend)


def test_tiles_leave_little_empty() -> None:
    assert default_tiles(64, 147, 12544, module.FOR_VALUES, pointwise=False)[:2] == (64, 64)
    assert default_tiles(512, 4608, 49, module.FOR_SUM, pointwise=False)[:2] == (128, 128)
    assert default_tiles(512, 4608, 49, module.FOR_NORMS, pointwise=False)[:2] == (128, 256)
    assert default_tiles(4, 36, 196, module.FOR_NORMS, pointwise=False)[:2] == (16, 64)
    assert default_tiles(128, 512, 784, module.FOR_VALUES, pointwise=True) == (128, 128, 64, 8, 3)
    assert default_tiles(2048, 512, 49, module.FOR_SUM, pointwise=True)[:2] == (128, 64)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["three by three", "odd"])
def test_copies_of_some_samples_at_a_time_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, geometry, _ = operands(name)
    scale, made = torch.rand(len(g)), []
    for least in (module.LEAST_COPIES, 0):
        monkeypatch.setattr(module, "LEAST_COPIES", least)
        monkeypatch.setattr(module, "FEWEST_PROGRAMS", 1)
        product = ConvProduct(x, g, geometry, in_tf32=False)
        made.append([*conv_products(product, torch.float32), conv_sum(product, scale)])
        assert (len(list(product.pieces(product.plan(module.FOR_SUM)))) > 1) == (not least)
    (values, parts, total), (others, other_parts, other_total) = made
    assert torch.equal(values, others)
    assert torch.equal(parts, other_parts)
    torch.testing.assert_close(total, other_total, rtol=1e-6, atol=1e-6)


class Clamped(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.clamp(-1, 1), self.bias)


@pytest.mark.usefixtures("engines_use_kernels")
@pytest.mark.parametrize("path", ["direct", "keep"])
def test_where_a_derivative_begins_to_differ_no_sample_has_a_share_until_that_is_known(path: str) -> None:
    torch.manual_seed(0)
    model, x = Clamped(3, 4, 3), torch.randn(5, 3, 4, 4)
    with FlashEngine(model, max_grad_norm=1.0, path=path) as engine:
        for dropped in (0, 5, 0):
            before = engine.nonfinite_samples or 0
            model.zero_grad()
            model(x).flatten(1).square().sum(1).mean().backward()
            engine.finish()
            assert engine.nonfinite_samples == before + dropped
            assert model.weight.grad.isfinite().all()
            assert model.weight.grad.any() == (dropped == 0)
            with torch.no_grad():
                model.weight[:] = torch.linspace(-1.3, 0.9, model.weight.numel()).view_as(model.weight)

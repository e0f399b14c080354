"""Per-sample weight gradients of convolutions, their norms and their clipped sums, for each layer of three networks.

python benchmarks/kernels/bench_conv_products.py            # about 60 s on an H200
python benchmarks/kernels/bench_conv_products.py --json F   # each row as a line of JSON, too

Float32 operands read as TF32, copies included. `cudnn`: the whole batch's weight gradient, which ordinary training
makes. Errors are of some samples, relative to float64 products of operands without the bits that TF32 does not hold.
The last lines add the layers of each network up: norms and sum for layers whose gradients are larger than g, and
gradients that are kept for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from measurement import Report
from torch import Tensor

from dpscope.flash.kernels.conv_products import ConvProduct, Geometry, conv_products, conv_sum
from dpscope.flash.kernels.float32_products import truncated_to_tf32

SAMPLES = 4  # that are compared


class Shape(NamedTuple):
    batch: int
    channels: int
    outs: int
    kernel: int
    stride: int
    size: int

    @property
    def out(self) -> int:
        return (self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.outs * self.out**2 * self.channels * self.kernel**2

    def __str__(self) -> str:
        return f"{self.channels}-{self.outs} k{self.kernel} s{self.stride} {self.size}²"


def resnet18() -> Iterator[tuple[Shape, int]]:
    yield Shape(64, 3, 64, 7, 2, 224), 1
    yield Shape(64, 64, 64, 3, 1, 56), 4
    for outs, size in ((128, 56), (256, 28), (512, 14)):
        yield Shape(64, outs // 2, outs, 3, 2, size), 1
        yield Shape(64, outs // 2, outs, 1, 2, size), 1
        yield Shape(64, outs, outs, 3, 1, size // 2), 3


def resnet50() -> Iterator[tuple[Shape, int]]:
    yield Shape(64, 3, 64, 7, 2, 224), 1
    yield Shape(64, 64, 64, 1, 1, 56), 1
    yield Shape(64, 64, 64, 3, 1, 56), 3
    yield Shape(64, 64, 256, 1, 1, 56), 4
    yield Shape(64, 256, 64, 1, 1, 56), 2
    for width, size, blocks in ((128, 56, 4), (256, 28, 6), (512, 14, 3)):
        yield Shape(64, 2 * width, width, 1, 1, size), 1
        yield Shape(64, width, width, 3, 2, size), 1
        yield Shape(64, 2 * width, 4 * width, 1, 2, size), 1
        yield Shape(64, width, 4 * width, 1, 1, size // 2), blocks
        yield Shape(64, 4 * width, width, 1, 1, size // 2), blocks - 1
        yield Shape(64, width, width, 3, 1, size // 2), blocks - 1


def wide_resnet() -> Iterator[tuple[Shape, int]]:
    yield Shape(256, 3, 16, 3, 1, 32), 1
    for channels, outs, stride, size in ((16, 64, 1, 32), (64, 128, 2, 32), (128, 256, 2, 16)):
        yield Shape(256, channels, outs, 3, stride, size), 1
        yield Shape(256, channels, outs, 1, stride, size), 1
        yield Shape(256, outs, outs, 3, 1, size // stride), 11


NETWORKS = {"ResNet-18": dict(resnet18()), "ResNet-50": dict(resnet50()), "WRN-40-4": dict(wide_resnet())}
SHAPES = dict.fromkeys(shape for network in NETWORKS.values() for shape in network)


def exact(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """Return the products of some samples in float64, (B, O, d)."""
    x, g = (truncated_to_tf32(each[:SAMPLES]).double() for each in (x, g))
    return g.flatten(2) @ geometry.unfold(x, tuple(g.shape[2:])).mT


def one_shape(report: Report, shape: Shape) -> dict[str, float]:
    pad = shape.kernel // 2
    geometry = Geometry((shape.kernel,) * 2, (shape.stride,) * 2, (pad, pad), (1, 1), 1)
    x = torch.randn(shape.batch, shape.channels, shape.size, shape.size, device="cuda")
    g = torch.randn(shape.batch, shape.outs, shape.out, shape.out, device="cuda")
    weight = torch.randn(shape.outs, shape.channels, *geometry.kernel, device="cuda")
    options = (geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], 1, [False, True, False])
    scale, truth = torch.rand(shape.batch, device="cuda"), exact(x, g, geometry)

    def product(some: int | None = None) -> ConvProduct:
        return ConvProduct(x[:some], g[:some], geometry, in_tf32=True)

    def error(made: Callable[[], Tensor], expected: Tensor) -> float:
        return float((made().double() - expected).norm() / expected.norm())

    def norms(some: int | None = None) -> Tensor:
        return conv_products(product(some), None)[1].sum(1)

    def kept(some: int | None = None) -> Any:
        return conv_products(product(some), torch.float32)[0]

    def total(some: int | None = None) -> Tensor:
        return conv_sum(product(some), scale[:some])

    weighted = torch.einsum("b,bod->od", scale[:SAMPLES].double(), truth)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], float] | None]] = {
        "cudnn": (partial(torch.ops.aten.convolution_backward, g, x, weight, None, *options), None),
        "norms": (norms, partial(error, partial(norms, SAMPLES), truth.square().sum((1, 2)))),
        "kept": (kept, partial(error, partial(kept, SAMPLES), truth)),
        "sum": (total, partial(error, partial(total, SAMPLES), weighted)),
    }
    return {
        name: report.measure(str(shape), name, call, flops=shape.flops, error=check)
        for name, (call, check) in calls.items()
    }


def main() -> None:
    torch.backends.cudnn.allow_tf32 = True
    report = Report("conv_products: per-sample gradients of convolutions")
    found = {shape: one_shape(report, shape) for shape in SHAPES}
    for name, layers in NETWORKS.items():
        ours = cudnn = 0.0
        for shape, count in layers.items():
            each = found[shape]
            is_kept = shape.channels * shape.kernel**2 <= shape.out**2
            ours += count * (each["kept"] if is_kept else each["norms"] + each["sum"])
            cudnn += count * each["cudnn"]
        print(f"{name}: {ours:.2f} ms, cuDNN's weight gradients {cudnn:.2f} ms")
    report.close()


if __name__ == "__main__":
    main()

"""Per-sample weight gradients of convolutions, their squares and their clipped sums, against cuDNN and torch.bmm.

python benchmarks/kernels/bench_conv_products.py OUT             # about 40 s on an H200, most of it compilation
python benchmarks/kernels/bench_conv_products.py OUT --workers 4  # with fewer processes that compile

Milliseconds, medians of 7. `cudnn`: the whole batch's weight gradient, which ordinary training makes. `bmm`: unfolded
patches and torch.bmm, without norms.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.conv_products import (
    ConvProduct,
    ConvTiles,
    Geometry,
    conv_products,
    conv_sum,
    default_tiles,
)


class Shape(NamedTuple):
    batch: int
    channels: int
    outs: int
    kernel: int
    stride: int
    size: int
    count: int  # in a ResNet-50, or a WRN-40-4

    def default_tiles(self) -> ConvTiles:
        length = ((self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1) ** 2
        return default_tiles(self.outs, self.channels * self.kernel**2, length, pointwise=self.kernel == 1)

    def __str__(self) -> str:
        return f"{self.batch} x {self.channels}-{self.outs} k{self.kernel} s{self.stride} {self.size}²"


SHAPES = [
    Shape(64, 3, 64, 7, 2, 224, 1), Shape(64, 64, 64, 1, 1, 56, 1), Shape(64, 64, 64, 3, 1, 56, 3),
    Shape(64, 64, 256, 1, 1, 56, 6), Shape(64, 128, 128, 3, 1, 28, 4), Shape(64, 512, 128, 1, 1, 28, 8),
    Shape(64, 256, 256, 3, 1, 14, 6), Shape(64, 256, 1024, 1, 1, 14, 12), Shape(64, 512, 512, 3, 1, 7, 3),
    Shape(64, 512, 2048, 1, 1, 7, 6), Shape(256, 64, 64, 3, 1, 32, 11), Shape(256, 128, 128, 3, 1, 16, 11),
    Shape(256, 256, 256, 3, 1, 8, 11),
]  # fmt: skip
TILES = [
    ConvTiles(64, 64, 32, 4, 3), ConvTiles(64, 128, 32, 4, 3), ConvTiles(128, 64, 32, 4, 3),
    ConvTiles(128, 128, 32, 8, 3), ConvTiles(128, 128, 64, 8, 3), ConvTiles(64, 64, 64, 4, 4),
]  # fmt: skip
MODES = ("store", "squares", "sum")
DTYPES = (torch.float32, torch.bfloat16)


def operands(shape: Shape, dtype: torch.dtype, batch: int, device: str) -> tuple[Tensor, Tensor, Geometry]:
    k, s = (shape.kernel,) * 2, (shape.stride,) * 2
    geometry = Geometry(k, s, (shape.kernel // 2,) * 2, (1, 1), 1)
    out = (shape.size + 2 * (shape.kernel // 2) - shape.kernel) // shape.stride + 1
    x = torch.randn(batch, shape.channels, shape.size, shape.size, device=device).to(dtype)
    return x, torch.randn(batch, shape.outs, out, out, device=device).to(dtype), geometry


def call_of(mode: str, x: Tensor, g: Tensor, geometry: Geometry, tiles: ConvTiles | None) -> Callable[[], Any]:
    scale = torch.rand(len(x), device=x.device)

    def call() -> Any:
        product = ConvProduct(x, g, geometry, in_tf32=True, tiles=tiles)
        return (
            conv_sum(product, scale) if mode == "sum" else conv_products(product, g.dtype if mode == "store" else None)
        )

    return call


def configurations() -> Iterator[tuple[Shape, torch.dtype, str, ConvTiles]]:
    for shape in SHAPES:
        for dtype in DTYPES:
            for mode in MODES:
                for tiles in {*TILES, shape.default_tiles()}:
                    yield shape, dtype, mode, tiles


def compile_part(part: int, workers: int) -> None:
    """Compile every kernel of a share of the configurations into Triton's cache, with a batch of two."""
    seen = {}
    for shape, dtype, mode, tiles in configurations():
        x, g, geometry = operands(shape, dtype, 2, "cuda")
        product = ConvProduct(x, g, geometry, in_tf32=True, tiles=tiles)
        kind = product.plan.constants
        seen.setdefault((dtype, mode, tiles, kind["WORD"], kind["POINTWISE"]), (x, g, geometry))
    for (_, mode, tiles, _, _), (x, g, geometry) in list(seen.items())[part::workers]:
        with suppress(Exception):  # a tile may not fit into shared memory
            call_of(mode, x, g, geometry, tiles)()
    torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any]) -> float:
    try:
        for _ in range(3):
            call()
    except Exception as failure:  # a tile may not fit into shared memory
        print(f"{type(failure).__name__}: {str(failure)[:200]}")
        return math.inf
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def wgrad(x: Tensor, g: Tensor, geometry: Geometry) -> Callable[[], Tensor]:
    weight = x.new_empty(g.shape[1], x.shape[1], *geometry.kernel)
    options = (geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], 1, [False, True, False])
    return lambda: torch.ops.aten.convolution_backward(g, x, weight, None, *options)[1]


def by_patches(x: Tensor, g: Tensor, geometry: Geometry) -> Callable[[], Tensor]:
    def call() -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = True
        made = torch.bmm(g.flatten(2), geometry.unfold(x, tuple(g.shape[2:])).mT)
        torch.backends.cuda.matmul.allow_tf32 = False
        return made

    return call


def error(x: Tensor, g: Tensor, geometry: Geometry) -> float:
    """Of one sample's gradient, and of its norm, against float64."""
    values, parts = conv_products(ConvProduct(x, g, geometry, in_tf32=True), torch.float32)
    assert values is not None
    exact = wgrad(x[-1:].double(), g[-1:].double(), geometry)().flatten(1)
    of_norm = abs(float(parts[-1].sum() / values[-1].double().square().sum()) - 1)
    return max(float((values[-1] - exact).norm() / exact.norm()), of_norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--part", type=int)
    options = parser.parse_args()
    if options.part is not None:
        compile_part(options.part, options.workers)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(options.out), "--workers", str(options.workers), "--part"]
    for process in [subprocess.Popen([*command, str(part)]) for part in range(options.workers)]:
        process.wait()
    rows = []
    for shape in SHAPES:
        for dtype in DTYPES:
            x, g, geometry = operands(shape, dtype, shape.batch, "cuda")
            row: dict[str, Any] = {"shape": str(shape), "count": shape.count, "dtype": str(dtype)}
            row["cudnn"] = milliseconds(wgrad(x, g, geometry))
            row["bmm"] = milliseconds(by_patches(x, g, geometry))
            row["error"] = error(x, g, geometry)
            default = shape.default_tiles()
            for mode in MODES:
                times = {tiles: milliseconds(call_of(mode, x, g, geometry, tiles)) for tiles in {*TILES, default}}
                best = min(times, key=lambda tiles: times[tiles])
                row[mode] = {"default": times[default], "best": times[best], "tiles": list(best)}
                row[f"{mode} all"] = [[list(tiles), taken] for tiles, taken in times.items()]
            rows.append(row)
            line = f"{shape!s:28} {dtype.itemsize * 8} cudnn {row['cudnn']:.3f} bmm {row['bmm']:.3f}"
            for mode in MODES:
                line += f"  {mode} {row[mode]['default']:.3f} ({row[mode]['best']:.3f} {tuple(row[mode]['tiles'])})"
            print(f"{line}  error {row['error']:.1e}", flush=True)
            del x, g
    (options.out / "conv-products.json").write_text(json.dumps(rows, indent=1))
    for dtype in DTYPES:
        for batch, name in ((64, "ResNet-50"), (256, "WRN-40-4")):
            chosen = [row for row in rows if row["dtype"] == str(dtype) and row["shape"].startswith(f"{batch} ")]
            total = {mode: sum(row["count"] * row[mode] for row in chosen) for mode in ("cudnn", "bmm")}
            total |= {mode: sum(row["count"] * row[mode]["default"] for row in chosen) for mode in MODES}
            print(name, dtype, "ms of all layers:", {mode: round(taken, 2) for mode, taken in total.items()})


if __name__ == "__main__":
    main()

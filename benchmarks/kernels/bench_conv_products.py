"""Per-sample weight gradients of convolutions, their norms and their clipped sums, for each layer shape of a network.

python benchmarks/kernels/bench_conv_products.py OUT             # about 100 s on an H200, most of it compilation
python benchmarks/kernels/bench_conv_products.py OUT --workers 4  # with fewer processes that compile

Milliseconds, medians of captured calls, float32 operands read as TF32. Columns:

    prep    copies of x and g that the kernels read
    norms   squared norms alone; kept: per-sample gradients with their norms; sum: the clipped sum
    gram    norms by Gram matrices, without copies
    cudnn   the whole batch's weight gradient, which ordinary training makes

Errors are of some samples, relative to float64 products of operands without the bits that TF32 does not hold. All
tiles are in OUT/conv-products.json. A variant that fails to compile or to run is listed below the table.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels import conv_products as windows
from dpscope.flash.kernels.conv_gram import conv_gram_norms, serves_gram
from dpscope.flash.kernels.conv_products import Geometry
from dpscope.flash.kernels.float32_products import truncated_to_tf32

try:
    import conv_descriptors as descriptors
except ImportError:
    descriptors = None  # type: ignore[assignment]
try:
    import conv_products_before as before
except ImportError:
    before = None  # type: ignore[assignment]


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
    def width(self) -> int:
        return self.channels * self.kernel**2

    @property
    def is_kept(self) -> bool:
        """True if per-sample gradients take no more memory than the output gradient."""
        return self.width <= self.out**2

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
SHAPES = list(dict.fromkeys(shape for network in NETWORKS.values() for shape in network))
MODES = ("norms", "kept", "sum")
TILES = [
    (64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 64, 32, 4, 3), (128, 128, 32, 8, 3), (64, 256, 32, 8, 3),
    (128, 256, 32, 8, 3), (128, 128, 64, 8, 3),
]  # fmt: skip
# Tiles and kernel elements of a program.
DESCRIPTOR_TILES = [
    ((64, 64, 32, 4, 4), 1), ((64, 64, 32, 4, 4), 3), ((64, 64, 32, 8, 4), 3), ((64, 128, 32, 4, 4), 1),
    ((128, 64, 32, 8, 4), 3), ((128, 128, 32, 8, 3), 1), ((128, 128, 32, 4, 3), 1), ((128, 128, 64, 8, 3), 1),
    ((128, 256, 32, 8, 3), 1), ((256, 128, 32, 8, 3), 1),
]  # fmt: skip
SAMPLES = 4  # that are compared
DEVICE = "cuda"
Call = Callable[[], Any]


class Operands:
    """Operands of a shape, and float64 products of some samples."""

    def __init__(self, shape: Shape, batch: int, *, exact: bool) -> None:
        pad = shape.kernel // 2
        self.geometry = Geometry((shape.kernel,) * 2, (shape.stride,) * 2, (pad, pad), (1, 1), 1)
        self.x = torch.randn(batch, shape.channels, shape.size, shape.size, device=DEVICE)
        self.g = torch.randn(batch, shape.outs, shape.out, shape.out, device=DEVICE)
        self.chosen = torch.linspace(0, batch - 1, SAMPLES).long().to(DEVICE)
        self.scale = torch.zeros(batch, device=DEVICE)
        self.scale[self.chosen] = torch.tensor([1.0, 0.3, 2.0, 0.7], device=DEVICE)
        if exact:
            truncated = (truncated_to_tf32(each[self.chosen]).double() for each in (self.x, self.g))
            rows = [wgrad(x[None], g[None], self.geometry)().flatten() for x, g in zip(*truncated, strict=True)]
            self.values = torch.stack(rows)
            self.total = (self.scale[self.chosen].double()[:, None] * self.values).sum(0)

    def error(self, mode: str, found: Any) -> float:
        if mode == "sum":
            return float((found.flatten().double() - self.total).norm() / self.total.norm())
        values, squares = (None, found) if isinstance(found, Tensor) else (found[0], found[1].flatten(1).sum(1))
        exact = self.values.square().sum(1)
        error = (squares[self.chosen] / exact - 1).abs().max()
        if values is not None:
            error = error.maximum((values[self.chosen].flatten(1) - self.values).norm() / self.values.norm())
        return float(error)


def wgrad(x: Tensor, g: Tensor, geometry: Geometry) -> Call:
    weight = x.new_empty(g.shape[1], x.shape[1], *geometry.kernel)
    options = (geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], 1, [False, True, False])
    return lambda: torch.ops.aten.convolution_backward(g, x, weight, None, *options)[1]


def calls(shape: Shape, operands: Operands, *, by_descriptors: bool) -> Iterator[tuple[str, str, str, Call]]:
    """Yield variant, mode, tiles and call."""
    x, g, geometry, scale = operands.x, operands.g, operands.geometry, operands.scale
    modes = [mode for mode in MODES if mode != "kept" or shape.is_kept]
    if by_descriptors:
        yield from descriptor_calls(shape, operands, modes) if descriptors is not None else ()
        return
    yield "cudnn", "sum", "", wgrad(x, g, geometry)
    for name, module, tiles in (("before", before, [None]), ("windows", windows, [None, *TILES])):
        if module is None:
            continue
        yield name, "prep", "", partial(module.ConvProduct, x, g, geometry, in_tf32=True)
        for tile in tiles:
            if tile is not None and not _fits(tile, shape.outs, shape.width):
                continue
            kind = None if tile is None else module.ConvTiles(*tile)
            product = module.ConvProduct(x, g, geometry, in_tf32=True, tiles=kind)
            for mode in modes:
                yield name, mode, str(tile or "default"), _call(module, mode, product, scale)
            del product
    if serves_gram(x, g, geometry):
        yield "gram", "norms", "", lambda: conv_gram_norms(x, g, geometry, in_tf32=True)


def descriptor_calls(shape: Shape, operands: Operands, modes: list[str]) -> Iterator[tuple[str, str, str, Call]]:
    product = windows.ConvProduct(operands.x, operands.g, operands.geometry, in_tf32=True)
    for tile, taps in DESCRIPTOR_TILES:
        if shape.channels < 16 or shape.kernel**2 % taps or not _fits(tile, shape.outs, shape.channels):
            continue
        for mode in modes if taps == 1 else modes[:-1]:
            dtype = torch.float32 if mode == "kept" else None
            call = partial(descriptors.descriptor_products, product, dtype, tile, taps)
            if mode == "sum":
                call = partial(descriptors.descriptor_sum, product, operands.scale, tile)
            yield "descriptors", mode, f"{tile} x{taps}", call


def _fits(tile: tuple[int, ...], rows: int, columns: int) -> bool:
    """Return True if no more than half of a tile is empty."""
    return tile[0] <= max(64, rows) and tile[1] <= max(64, columns)


def _call(module: Any, mode: str, product: Any, scale: Tensor) -> Call:
    if mode == "sum":
        return lambda: module.conv_sum(product, scale)
    return lambda: module.conv_products(product, product.g.dtype if mode == "kept" else None)


def compile_part(part: int, workers: int) -> None:
    """Compile every kernel of a share of the configurations into Triton's cache, with a batch of four."""
    seen: set[Any] = set()
    for shape in SHAPES:
        operands = Operands(shape, 4, exact=False)
        for by_descriptors in (False, True):
            made = calls(shape, operands, by_descriptors=by_descriptors)
            for variant, mode, tiles, call in made:
                line = shape.out**2 if shape.kernel == 1 else shape.out
                kind = (variant, mode, tiles)
                if variant in ("before", "windows"):
                    kind += (math.gcd(shape.out**2, 8), shape.kernel == 1) if variant == "before" else (line % 8,)  # type: ignore[assignment]
                    kind += (windows.default_tiles(shape.outs, shape.width, shape.out**2, pointwise=shape.kernel == 1),)  # type: ignore[assignment]
                elif variant == "gram":
                    kind += (math.gcd(shape.out**2, 8), math.gcd(shape.size**2, 8))  # type: ignore[assignment]
                if variant == "cudnn" or kind in seen:
                    continue
                seen.add(kind)
                if len(seen) % workers == part:
                    try:
                        call()
                    except Exception:  # reported when it is measured
                        torch.cuda.synchronize()


def milliseconds(call: Call) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return median(times[1:])


def measure(out: Path, *, by_descriptors: bool) -> None:
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        of_shape: dict[str, Any] = {"shape": str(shape), "batch": shape.batch}
        try:
            operands = Operands(shape, shape.batch, exact=True)
            for variant, mode, tiles, call in calls(shape, operands, by_descriptors=by_descriptors):
                row = {**of_shape, "variant": variant, "mode": mode, "tiles": tiles}
                row |= {"ms": math.inf, "error": math.nan, "failure": ""}
                rows.append(row)
                try:
                    if mode != "prep" and variant != "cudnn":
                        row["error"] = operands.error(mode, call())
                    row["ms"] = milliseconds(call)
                except Exception as failure:
                    row["failure"] = f"{type(failure).__name__}: {str(failure)[:300]}"
        except Exception as failure:
            row = {**of_shape, "variant": "all", "mode": "", "tiles": "", "ms": math.inf, "error": math.nan}
            rows.append({**row, "failure": f"{type(failure).__name__}: {str(failure)[:300]}"})
        operands = None  # type: ignore[assignment]
        out.write_text(json.dumps(rows))


class Table:
    """Measured rows by shape."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def best(self, shape: Shape, variant: str, mode: str, tiles: str | None = None) -> dict[str, Any]:
        asked = [str(shape), shape.batch, variant, mode]
        found = [row for row in self.rows if [row[key] for key in ("shape", "batch", "variant", "mode")] == asked]
        found = [row for row in found if tiles is None or row["tiles"] == tiles]
        right = [row for row in found if not row["error"] > 5e-3]
        return min(right, key=lambda row: row["ms"], default={"ms": math.inf, "error": math.nan, "tiles": "-"})  # type: ignore[no-any-return]

    def total(self, shape: Shape, variants: tuple[str, ...], tiles: str | None = None) -> tuple[float, str]:
        """Return the least time for norms and sum, and how: kept, or one variant for each."""
        of = {mode: min(self.best(shape, each, mode, tiles)["ms"] for each in variants) for mode in MODES}
        prep = self.best(shape, "before" if variants == ("before",) else "windows", "prep")["ms"]
        read = shape.batch * shape.outs * shape.width * 4 / 4.2e9
        ways = {"twice": 2 * prep + of["norms"] + of["sum"], "kept": prep + of["kept"] + read}
        if "before" not in variants:
            ways["gram"] = self.best(shape, "gram", "norms")["ms"] + prep + of["sum"]
        best = min(ways, key=lambda way: ways[way])
        return ways[best], best

    def line(self, shape: Shape) -> str:
        line = f"{shape!s:20} {shape.batch:3} {self.best(shape, 'cudnn', 'sum')['ms']:6.3f}"
        for variant in ("before", "windows", "descriptors"):
            line += " |" + (f" {self.best(shape, variant, 'prep')['ms']:.3f}" if variant != "descriptors" else "")
            for mode in MODES:
                best = self.best(shape, variant, mode)
                line += f" {best['ms']:6.3f}" if math.isfinite(best["ms"]) else "      -"
                if variant != "before":
                    line += f" {''.join(best['tiles'].strip('(').replace(')', '').replace(' ', '')):14}"
        line += f" | {self.best(shape, 'gram', 'norms')['ms']:6.3f} |"
        errors = [row for row in self.rows if row["shape"] == str(shape) and row["batch"] == shape.batch]
        for variant in ("before", "windows", "descriptors", "gram"):
            found = [row["error"] for row in errors if row["variant"] == variant and row["error"] == row["error"]]
            line += f" {max(found, default=math.nan):.0e}"
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--part", type=int)
    parser.add_argument("--measure", choices=["loads", "descriptors"])
    options = parser.parse_args()
    if options.part is not None:
        compile_part(options.part, options.workers)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.measure:
        measure(options.out / f"{options.measure}.json", by_descriptors=options.measure == "descriptors")
        return
    command = [sys.executable, __file__, str(options.out), "--workers", str(options.workers)]
    for process in [subprocess.Popen([*command, "--part", str(part)]) for part in range(options.workers)]:
        process.wait()
    rows: list[dict[str, Any]] = []
    for which in ("loads", "descriptors"):  # each in its own process: a fault in one does not stop the other
        subprocess.run([*command, "--measure", which], check=False)
        if (options.out / f"{which}.json").exists():
            rows += json.loads((options.out / f"{which}.json").read_text())
    report(rows)
    (options.out / "conv-products.json").write_text(json.dumps(rows, indent=1))


def report(rows: list[dict[str, Any]]) -> None:
    table = Table(rows)
    print(
        "layer batch cudnn | before: prep norms kept sum | windows: prep norms kept sum | descriptors: norms kept sum |"
    )
    print("gram | largest errors: before windows descriptors gram")
    for shape in SHAPES:
        print(table.line(shape))
    for name, network in NETWORKS.items():
        print(name, "cudnn", round(sum(n * table.best(shape, "cudnn", "sum")["ms"] for shape, n in network.items()), 2))
        for label, variants, tiles in (
            ("before", ("before",), None), ("windows, default tiles", ("windows",), "default"),
            ("windows", ("windows",), None), ("descriptors", ("descriptors",), None),
            ("any", ("windows", "descriptors"), None),
        ):  # fmt: skip
            each = {shape: table.total(shape, variants, tiles) for shape in network}
            total = sum(count * each[shape][0] for shape, count in network.items() if math.isfinite(each[shape][0]))
            missing = sum(not math.isfinite(found) for found, _ in each.values())
            print(f"  {label:24} {total:7.2f} ms, {missing} layers not served")
        print("  ", ", ".join(f"{shape}: {each[shape][1]} {each[shape][0]:.3f}" for shape in network))
    failures: dict[str, list[str]] = {}
    for row in rows:
        if row["failure"]:
            failures.setdefault(f"{row['variant']} {row['failure'][:160]}", []).append(f"{row['shape']} {row['tiles']}")
    for failure, where in failures.items():
        print(f"failed {len(where)} times, first {where[0]}: {failure}")
    wrong = [row for row in rows if row["error"] > 1e-4]
    for row in wrong[:10]:
        print("wrong:", {key: row[key] for key in ("shape", "variant", "mode", "tiles", "error")})
    print(len(wrong), "wrong of", len(rows))


if __name__ == "__main__":
    main()

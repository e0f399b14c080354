"""Per-sample products and their norms, all of preset 1b, against torch.bmm and a kernel that reads them for norms."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from measurement import FF, LAYERS, VOCABULARY, D, Report, largest_relative_error
from torch import Tensor

from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.sample_products import LONG_SAMPLES, SHORT_SAMPLES, ProductTiles, products_and_norms

SIZES = [(8, 1024), (16, 1024), (4, 2048), (2, 4096), (16, 512), (32, 256), (64, 128), (64, 64)]
WIDTHS = {(D, D): 4 * LAYERS, (FF, D): LAYERS, (D, FF): LAYERS, (VOCABULARY, D): 1}  # (p, d): products of a step
TILES = {"short": SHORT_SAMPLES, "long": LONG_SAMPLES}


def products(x: Tensor, g: Tensor) -> Tensor:
    return torch.bmm(g.mT, x)


def error_of(x: Tensor, g: Tensor, tiles: ProductTiles) -> float:
    """Of the norms, against those of the values that are stored."""
    made = products_and_norms(x, g, tiles=tiles)
    if made is None:
        raise RuntimeError("the kernel does not serve this GPU, or is off")
    values, squares = made
    assert largest_relative_error(values[0], g[0].double().mT @ x[0].double()) < 2.0**-7, "wrong values"
    return largest_relative_error(squares.sum(1), torch.stack([each.double().square().sum() for each in values]))


def host_us(call: Callable[[], Any]) -> float:
    """Median µs that a call takes the host, of 200 after 20, with few launches waiting for the device."""
    times = []
    for i in range(220):
        if i % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return median(times[20:])


def measure_size(report: Report, batch: int, length: int) -> dict[str, float]:
    """ms of a step's products, by variant."""
    total = dict.fromkeys(("bmm", "norms", *TILES), 0.0)
    for (p, d), count in WIDTHS.items():
        x, g = (torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16) for width in (d, p))
        shape, flops = f"{batch} × {length}, {p} × {d}", 2.0 * g.numel() * d
        measure = partial(report.measure, shape, flops=flops)
        values = products(x, g)
        total["bmm"] += count * measure("bmm", partial(products, x, g))
        total["norms"] += count * report.measure(
            shape, "norms", partial(kept_norms_squared, [values]), nbytes=values.nbytes
        )
        del values
        for name, tiles in TILES.items():
            call = partial(products_and_norms, x, g, tiles=tiles)
            total[name] += count * measure(name, call, error=partial(error_of, x, g, tiles))
    return total


def main() -> None:
    report = Report("sample_products: V_b = G_bᵀX_b and Σ‖V_b‖² of preset 1b, bfloat16")
    x, g = (torch.randn(2, 64, width, device="cuda", dtype=torch.bfloat16) for width in (256, 128))
    values = products(x, g)
    for name, call in {
        "products_and_norms": partial(products_and_norms, x, g),
        "bmm": partial(products, x, g),
        "norms": partial(kept_norms_squared, [values]),
    }.items():
        print(f"host time of one call: {name} {host_us(call):.1f} µs")
    totals = {f"{batch} × {length}": measure_size(report, batch, length) for batch, length in SIZES}
    print(f"\nms for all products of a step\n{'':<12}{'bmm + norms':>18}" + "".join(f"{name:>10}" for name in TILES))
    for size, row in totals.items():
        both = f"{row['bmm']:.1f} + {row['norms']:.1f}"
        print(f"{size:<12}{both:>18}" + "".join(f"{row[name]:>10.1f}" for name in TILES))
    report.close()


if __name__ == "__main__":
    main()

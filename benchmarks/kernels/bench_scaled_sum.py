"""The clipped weight gradient Σ_b c_b G_bᵀX_b against cuBLAS: unscaled (the ideal), and scaled beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measurement import FF, VOCABULARY, D, Report, largest_relative_error

from dpscope.flash.kernels.scaled_sum import SumTiles, scaled_sum

TILES = [
    SumTiles(128, 256, 64, 8, 3),
    SumTiles(128, 256, 64, 8, 4),
    SumTiles(256, 128, 64, 8, 4),
    SumTiles(128, 256, 64, 8, 4, flat=False),
    SumTiles(256, 128, 64, 8, 4, flat=False),
    SumTiles(128, 128, 64, 8, 3),
    SumTiles(128, 128, 64, 4, 3),
    SumTiles(128, 128, 128, 8, 3),
    SumTiles(128, 256, 32, 8, 6),
]


def name(tiles: SumTiles) -> str:
    blocks = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return f"kernel {blocks} {tiles.num_warps}w {tiles.num_stages}st {'flat' if tiles.flat else 'nested'}"


def exact_sum(g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """The first `rows` rows in float64: enough to see the error, cheap enough to compute."""
    scaled = g[:, :, :rows].double() * scale.double()[:, None, None]
    return scaled.reshape(-1, rows).T @ x.double().reshape(-1, x.shape[2])


def main() -> None:
    report = Report("scaled_sum: clipped weight gradient, bf16 operands, float32 result")
    totals: dict[tuple[str, str], float] = {}
    for batch, length in [(8, 1024), (16, 1024), (16, 256), (32, 256)]:
        for label, p, d, count in [("d->d", D, D, 80), ("up", FF, D, 20), ("down", D, FF, 20)]:
            for variant, took in one_layer(report, batch, length, label, p, d).items():
                key = (f"B={batch} T={length}", variant)
                totals[key] = totals.get(key, 0.0) + took * count
    one_layer(report, 8, 1024, "head", VOCABULARY, D)
    print("\nwhole model (80 d->d, 20 up, 20 down, no head), ms")
    for (shape, variant), total in totals.items():
        print(f"{shape:<26} {variant:<44} {total:.2f}")
        report.rows.append({"shape": shape, "variant": f"total {variant}", "unit": "ms", "median": total})
    report.close()


def one_layer(report: Report, batch: int, length: int, label: str, p: int, d: int) -> dict[str, float]:
    """Median ms of every variant."""
    shape = f"B={batch} T={length} {label}"
    g = torch.randn(batch, length, p, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(batch, length, d, device="cuda", dtype=torch.bfloat16)
    scale = torch.rand(batch, device="cuda") * 0.9 + 0.1
    flops = 2.0 * batch * length * p * d
    exact = exact_sum(g, x, scale, 128)
    left, right = g.reshape(-1, p).T, x.reshape(-1, d)

    def deviation(call: Callable[[], torch.Tensor]) -> float:
        return largest_relative_error(call()[:128], exact)

    took = {}
    for variant, call in (
        ("cuBLAS unscaled, float32 out", lambda: torch.mm(left, right, out_dtype=torch.float32)),
        ("cuBLAS unscaled, bf16 out", lambda: torch.mm(left, right)),
    ):
        took[variant] = report.measure(shape, variant, call, flops=flops)
    scaled = {"scale narrower, then cuBLAS": partial(scaled_sum, g, x, scale, backend="cublas")}
    for tiles in TILES:
        scaled[name(tiles)] = partial(scaled_sum, g, x, scale, tiles=tiles)
    for variant, call in scaled.items():
        took[variant] = report.measure(shape, variant, call, flops=flops, error=partial(deviation, call))
    out = torch.zeros(p, d, device="cuda")
    adding = partial(scaled_sum, g, x, scale, out=out, accumulate=True)
    took["kernel, adding to out"] = report.measure(shape, "kernel, adding to out", adding, flops=flops)
    return took


if __name__ == "__main__":
    main()

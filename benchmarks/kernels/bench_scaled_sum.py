"""The clipped weight gradients Σ_b c_b G_bᵀX_b of a whole model, against cuBLAS without factors (the ideal)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from measurement import FF, LAYERS, VOCABULARY, D, Report, largest_relative_error

from dpscope.flash.kernels.scaled_sum import SumTiles, scaled_sums

GROUP_BYTES = 2**30  # of outputs a call
SHAPES = [(8, 1024), (16, 1024), (16, 256), (32, 256)]

TILES = [SumTiles(), SumTiles(128, 256, 64, 8, 4), SumTiles(256, 128, 64, 8, 4), SumTiles(128, 128, 64, 4, 3)]
LEAD_CYCLES = 80_000_000  # 40 ms or more of an idle device: longer than any variant takes the host


@dataclass(frozen=True)
class Group:
    gs: list[torch.Tensor]
    xs: list[torch.Tensor]


def name(tiles: SumTiles) -> str:
    blocks = f"{tiles.block_m}x{tiles.block_n}x{tiles.block_k}"
    return f"{blocks} {tiles.num_warps}w {tiles.num_stages}st" + (" (default)" if tiles == SumTiles() else "")


def model_groups(batch: int, length: int) -> list[Group]:
    """Weights in the order of the layers: q, k, v, o, up, down; the head last. Split as the engine would."""
    widths = [*([(D, D)] * 4 + [(FF, D), (D, FF)]) * LAYERS, (VOCABULARY, D)]
    groups, size = [Group([], [])], 0
    for p, d in widths:
        if size + 4 * p * d > GROUP_BYTES:
            groups.append(Group([], []))
            size = 0
        size += 4 * p * d
        for tensors, width in ((groups[-1].gs, p), (groups[-1].xs, d)):
            tensors.append(torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16))
    return groups


def whole_model(groups: list[Group], scale: torch.Tensor, tiles: SumTiles) -> None:
    for group in groups:
        scaled_sums(group.gs, group.xs, scale, tiles=tiles)


def one_by_one(groups: list[Group], scale: torch.Tensor) -> None:
    for group in groups:
        _ = [scaled_sums([g], [x], scale) for g, x in zip(group.gs, group.xs, strict=True)]


def library(groups: list[Group]) -> None:
    for group in groups:
        _ = [
            torch.mm(g.reshape(-1, g.shape[2]).T, x.reshape(-1, x.shape[2]), out_dtype=torch.float32)
            for g, x in zip(group.gs, group.xs, strict=True)
        ]


def times(call: Callable[[], None]) -> tuple[float, float]:
    """Median ms on the device and least ms on the host of one call, which takes tens of milliseconds."""
    call()
    device, host = [], []
    for _ in range(4):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(LEAD_CYCLES)  # the host gets ahead, so that what is timed is the device's work
        start.record()
        clock = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - clock))
        stop.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(stop))
    return median(device), min(host)


def exact_sum(g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """The first `rows` rows in float64: enough to see the error, cheap enough to compute."""
    scaled = g[:, :, :rows].double() * scale.double()[:, None, None]
    return scaled.reshape(-1, rows).T @ x.double().reshape(-1, x.shape[2])


def main() -> None:
    report = Report("scaled_sums: clipped weight gradients of preset 1b, bf16 operands, float32 results")
    totals: dict[str, dict[str, tuple[float, float]]] = {}
    for batch, length in SHAPES:
        shape = f"B={batch} T={length}"
        groups = model_groups(batch, length)
        scale = torch.rand(batch, device="cuda") * 0.9 + 0.1
        flops = sum(2.0 * g.numel() * x.shape[2] for group in groups for g, x in zip(group.gs, group.xs, strict=True))
        exact = exact_sum(groups[0].gs[0], groups[0].xs[0], scale, 128)
        calls: dict[str, Callable[[], None]] = {"cuBLAS, no factors": partial(library, groups)}
        for tiles in TILES:
            calls[name(tiles)] = partial(whole_model, groups, scale, tiles)
        calls["one by one, default tiles"] = partial(one_by_one, groups, scale)
        for variant, call in calls.items():
            try:
                took, host = times(call)
            except Exception as problem:  # a configuration the device has no room for is one line
                print(f"{shape:<26} {variant:<44} FAILED {' '.join(str(problem).split())[:120]}", flush=True)
                continue
            totals.setdefault(variant, {})[shape] = (took, host)
            rate = f"{flops / took / 1e9:.0f} TFLOP/s"
            print(f"{shape:<26} {variant:<44} {took:<8.3f} host {host:<8.3f} {rate:>16}", flush=True)
            row = {"shape": shape, "variant": variant, "unit": "ms", "median": took, "host": host, "flops": flops}
            report.rows.append(row)
        for tiles in TILES:
            got = scaled_sums(groups[0].gs[:2], groups[0].xs[:2], scale, tiles=tiles)[0][:128]
            error = largest_relative_error(got, exact)
            assert error < 1e-4, f"{name(tiles)}: {error:.1e}"
        del groups, calls
        torch.cuda.empty_cache()
    print_totals(totals)
    report.close()


def print_totals(totals: dict[str, dict[str, tuple[float, float]]]) -> None:
    shapes = [f"B={batch} T={length}" for batch, length in SHAPES]
    print(f"\nwhole model, ms on the device (ms on the host)\n{'':<44}" + "".join(f"{shape:>18}" for shape in shapes))
    for variant, row in totals.items():
        cells = (f"{row[shape][0]:.2f} ({row[shape][1]:.2f})" if shape in row else "failed" for shape in shapes)
        print(f"{variant:<44}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()

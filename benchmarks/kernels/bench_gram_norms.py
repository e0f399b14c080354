"""Squared per-sample norms of a whole model by the triangular Gram kernel: batched over layers against one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from measurement import FF, LAYERS, VOCABULARY, D, Report, host_ms
from triton.tools.tensor_descriptor import TensorDescriptor

from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramTiles, GramUnit

LONG = [
    GramTiles(128, 128, 64, 8, 3, tma=True),
    GramTiles(128, 128, 64, 8, 4, tma=True),
    GramTiles(128, 128, 64, 8, 5, tma=True),
    GramTiles(128, 128, 128, 8, 3, tma=True),
    GramTiles(64, 128, 64, 4, 4, tma=True),
    GramTiles(128, 128, 64, 8, 4, tma=False),
    GramTiles(128, 128, 64, 8, 3, tma=False),
]
SHORT = [
    GramTiles(128, 128, 64, 8, 4, tma=True),
    GramTiles(128, 128, 128, 8, 3, tma=True),
    GramTiles(64, 128, 128, 4, 2, tma=True),
    GramTiles(64, 128, 64, 4, 4, tma=True),
    GramTiles(64, 128, 128, 4, 4, tma=True),
    GramTiles(64, 64, 128, 4, 3, tma=True),
    GramTiles(64, 64, 64, 4, 4, tma=True),
    GramTiles(128, 128, 64, 8, 4, tma=False),
]


@triton.jit
def one_unit_kernel(x, g, partials, batch, n_tiles, d, p, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The yardstick: one launch a layer, descriptors made on the host, square tiles."""
    program = tl.program_id(0)
    tile = program % n_tiles
    b = program // n_tiles
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    j = tile - i * (i + 1) // 2
    x_gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, d, BLOCK_K):
        rows = x.load([b, i * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        cols = x.load([b, j * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        x_gram = tl.dot(rows, cols.T, x_gram)
    g_gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, p, BLOCK_K):
        rows = g.load([b, i * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        cols = g.load([b, j * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        g_gram = tl.dot(rows, cols.T, g_gram)
    tl.store(partials + program, tl.sum(x_gram * g_gram) * tl.where(i == j, 1.0, 2.0))


def one_unit(unit: GramUnit, block: int = 128, block_k: int = 64) -> torch.Tensor:
    (x,), (g,) = unit.xs, unit.gs
    batch, length, _ = x.shape
    n = -(-length // block)
    partials = torch.empty(batch, n * (n + 1) // 2, device=x.device)
    one_unit_kernel[(partials.numel(),)](
        TensorDescriptor.from_tensor(x, [1, block, block_k]),
        TensorDescriptor.from_tensor(g, [1, block, block_k]),
        partials,
        batch,
        partials.shape[1],
        x.shape[2],
        g.shape[2],
        BLOCK=block,
        BLOCK_K=block_k,
        num_warps=8,
        num_stages=4,
    )
    return partials.sum(1)


def model_units(batch: int, length: int) -> list[GramUnit]:
    def of(width: int) -> torch.Tensor:
        return torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)

    units = []
    for _ in range(LAYERS):
        units += [
            GramUnit(xs=(of(D),), gs=(of(D), of(D), of(D))),  # q, k, v
            GramUnit(xs=(of(D),), gs=(of(D),)),  # o
            GramUnit(xs=(of(D),), gs=(of(FF),)),  # up
            GramUnit(xs=(of(FF),), gs=(of(D),)),  # down
        ]
    return [*units, GramUnit(xs=(of(D),), gs=(of(VOCABULARY),))]


def joined(unit: GramUnit) -> GramUnit:
    """The same unit with its g in one buffer, for the yardstick kernel."""
    return unit if len(unit.gs) == 1 else GramUnit(xs=unit.xs, gs=(torch.cat(unit.gs, dim=2),))


def ideal_flops(units: list[GramUnit]) -> float:
    """Multiply-adds of the lower triangle alone, times two."""
    total = 0.0
    for unit in units:
        batch, length, _ = unit.gs[0].shape
        total += batch * length * (length + 1) * sum(tensor.shape[2] for tensor in (*unit.gs, *unit.xs))
    return total


def name(tiles: GramTiles) -> str:
    blocks = f"{tiles.block_t}x{tiles.block_s}x{tiles.block_k}"
    return f"{blocks} {tiles.num_warps}w {tiles.num_stages}st {'tma' if tiles.tma else 'pointers'}"


def main() -> None:
    report = Report("gram_norms: squared norms of all Linear layers of preset 1b, bf16")
    for batch, length in [(8, 1024), (16, 1024), (16, 256), (32, 256)]:
        whole_model(report, batch, length)
        torch.cuda.empty_cache()
    embedding(report)
    float32(report)
    report.close()


def whole_model(report: Report, batch: int, length: int) -> None:
    shape = f"B={batch} T={length}"
    units = model_units(batch, length)
    flops = ideal_flops(units)
    few = [GramUnit(xs=tuple(x[:2] for x in u.xs), gs=tuple(g[:2] for g in u.gs)) for u in units[:4]]
    exact = sum(
        gram_norms_squared(
            [GramUnit(xs=tuple(x.double() for x in u.xs), gs=tuple(g.double() for g in u.gs))], backend="torch"
        )
        for u in few
    )

    def batched(tiles: GramTiles) -> torch.Tensor:
        return gram_norms_squared(units, tiles=tiles)

    def one_by_one(tiles: GramTiles) -> None:
        for unit in units:
            gram_norms_squared([unit], tiles=tiles)

    def deviation(tiles: GramTiles) -> float:
        return ((gram_norms_squared(few, tiles=tiles).double() - exact).abs() / exact).max().item()

    best, best_tiles = float("inf"), LONG[1]
    for tiles in SHORT if length <= 256 else LONG:
        label = f"batched {name(tiles)}"
        took = report.measure(shape, label, partial(batched, tiles), flops=flops, error=partial(deviation, tiles))
        if took < best:
            best, best_tiles = took, tiles
    report.measure(shape, f"one by one {name(best_tiles)}", partial(one_by_one, best_tiles), flops=flops)
    print(f"{shape:<26} host time of one batched call {host_ms(partial(batched, best_tiles)):.2f} ms")
    single = [joined(unit) for unit in units]
    report.measure(
        shape,
        "one by one, host descriptors 128x128x64",
        lambda: [one_unit(unit) for unit in single],
        flops=flops,
    )
    for label, unit in (("d->d", single[1]), ("qkv", single[0]), ("d->4d", single[2])):
        one = ideal_flops([unit])
        report.measure(f"{shape} {label}", "host descriptors", partial(one_unit, unit), flops=one)
        report.measure(f"{shape} {label}", "table", partial(gram_norms_squared, [unit], tiles=best_tiles), flops=one)


def embedding(report: Report) -> None:
    for batch, length in [(8, 1024), (16, 256), (1, 16384)]:
        ids = torch.randint(0, VOCABULARY, (batch, length), device="cuda")
        uniform = GramUnit(ids=ids, gs=(torch.randn(batch, length, D, device="cuda", dtype=torch.bfloat16),))
        for variant, unit in (("uniform ids", uniform), ("16 distinct ids", uniform._replace(ids=ids % 16))):
            report.measure(f"B={batch} T={length} embedding", variant, partial(gram_norms_squared, [unit]))


def float32(report: Report) -> None:
    x, g = (torch.randn(8, 1024, D, device="cuda") for _ in range(2))
    unit = GramUnit(xs=(x,), gs=(g,))
    exact = gram_norms_squared([GramUnit(xs=(x.double(),), gs=(g.double(),))], backend="torch")

    def deviation(call: Callable[[], torch.Tensor]) -> float:
        return ((call().double() - exact).abs() / exact).max().item()

    plain, fast = GramTiles(64, 64, 32, 4, 3, tma=False), GramTiles(128, 128, 32, 8, 4, tma=True)
    for variant, call in (
        ("torch fallback", partial(gram_norms_squared, [unit], backend="torch")),
        ("kernel, ieee", partial(gram_norms_squared, [unit], backend="triton", tiles=plain)),
        ("kernel, tf32", partial(gram_norms_squared, [unit], backend="triton", tiles=fast, allow_tf32=True)),
    ):
        report.measure(
            "B=8 T=1024 d->d float32", variant, call, flops=ideal_flops([unit]), error=partial(deviation, call)
        )


if __name__ == "__main__":
    main()

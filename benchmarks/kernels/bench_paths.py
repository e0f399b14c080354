"""The cost model of places.py against measurement: norm, clipped sum and update of one layer, at shapes from a seed.

python benchmarks/kernels/bench_paths.py --seed 7      # 24 shapes in bf16, float32 and TF32: about a minute
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from triton.testing import do_bench

from dpscope.flash.gradients.contributions import Outer, sample_products
from dpscope.flash.gradients.paths import BYTES_PER_SECOND, DIRECT, GRAM, KEEP, Product, choose_path
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.fused_update import fused_adam_
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.scaled_sum import scaled_sums

LAYERS = 4  # of one shape, as in a model: one launch for all of them where the engine makes one
DTYPES = {"bf16": (torch.bfloat16, "highest"), "fp32": (torch.float32, "highest"), "tf32": (torch.float32, "high")}
MOST_BYTES, MOST_OPERATIONS = 16e9, {"bf16": 4e12, "fp32": 2e11, "tf32": 1e12}


def draw_shape(chance: random.Random) -> tuple[str, int, int, int, int]:
    """dtype, batch, length, d, p: widths in steps of 64, some of them a vocabulary; lengths from 64 to 8192."""
    while True:
        dtype = chance.choice(list(DTYPES))
        length = 8 * round(2 ** chance.uniform(6, 13) / 8)
        batch = max(2, round(2 ** chance.uniform(11, 14.5)) // length)
        d, p = (64 * round(2 ** chance.uniform(8, 13) / 64) for _ in range(2))
        p = chance.choice((p, p, p, 32000))
        held = LAYERS * (batch * (length * (d + p) + d * p) * DTYPES[dtype][0].itemsize + 16 * d * p)
        if held < MOST_BYTES and 2.0 * batch * length * d * p < MOST_OPERATIONS[dtype]:
            return dtype, batch, length, d, p


def calls(xs: list[Tensor], gs: list[Tensor]) -> dict[str, Callable[[], None]]:
    (batch, _, d), p = xs[0].shape, gs[0].shape[-1]
    scale = torch.rand(batch, device="cuda")
    params, firsts, seconds = ([torch.zeros(p, d, device="cuda") for _ in xs] for _ in range(3))

    def update(sums: list[Tensor], factors: Tensor | None = None) -> None:
        fused_adam_(params, sums, firsts, seconds, step=3, lr=1e-9, noise_std=1.0, factors=factors)

    def keep() -> None:
        values = [sample_products(x, g) for x, g in zip(xs, gs, strict=True)]
        kept_norms_squared(values)
        update(values, scale)

    def gram() -> None:
        gram_norms_squared([GramUnit(gs=(g,), xs=(x,)) for x, g in zip(xs, gs, strict=True)])
        update(scaled_sums(gs, xs, scale))

    def direct() -> None:
        for x, g in zip(xs, gs, strict=True):
            Outer(x, g, choose_path(Product(*x.shape, p))).norms_squared()
        update(scaled_sums(gs, xs, scale))

    return {GRAM: gram, DIRECT: direct, KEEP: keep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--shapes", type=int, default=24)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    print(torch.cuda.get_device_name(), torch.__version__, f"seed {arguments.seed}, µs a layer: predicted / measured")
    print(f"{'dtype batch × length, d → p':<36}" + "".join(f"{path:>18}" for path in (GRAM, DIRECT, KEEP)), "chosen")
    losses, errors = [], []
    for _ in range(arguments.shapes):
        name, batch, length, d, p = draw_shape(chance)
        dtype, precision = DTYPES[name]
        torch.set_float32_matmul_precision(precision)
        xs = [torch.randn(batch, length, d, device="cuda", dtype=dtype) for _ in range(LAYERS)]
        gs = [torch.randn(batch, length, p, device="cuda", dtype=dtype) for _ in range(LAYERS)]
        rounding = operand_rounding(xs[0].device) if dtype == torch.float32 else 0.0
        chosen = choose_path(Product(batch, length, d, p, itemsize=dtype.itemsize, rounding=rounding), "more")
        paths = [path for path in (GRAM, DIRECT, KEEP) if path != GRAM or not rounding]
        run = calls(xs, gs)
        state = 24.0 * d * p / BYTES_PER_SECOND  # parameters and moments, whatever the path
        predicted = {path: chosen.costs[path].seconds + state for path in paths}
        measured = {path: do_bench(run[path], warmup=10, rep=60, return_mode="median") / 1e3 / LAYERS for path in paths}
        best = min(measured, key=measured.__getitem__)
        losses.append(measured[chosen.path] / measured[best] - 1)
        errors += [predicted[path] / measured[path] for path in paths]
        columns = [
            f"{predicted[path] * 1e6:8.0f} /{measured[path] * 1e6:7.0f}" if path in measured else " " * 17
            for path in (GRAM, DIRECT, KEEP)
        ]
        verdict = "" if losses[-1] < 0.02 else f"but {best} is faster: +{losses[-1]:.0%}"
        print(f"{name} {batch} × {length}, {d} → {p}".ljust(36), *columns, chosen.path, verdict, flush=True)
        del xs, gs, run
    wrong = sum(loss >= 0.02 for loss in losses)
    print(
        f"not the fastest path: {wrong} of {len(losses)}, worst +{max(losses):.0%}, mean +{statistics.mean(losses):.1%}"
    )
    print(f"predicted / measured: median {statistics.median(errors):.2f}, {min(errors):.2f} to {max(errors):.2f}")


if __name__ == "__main__":
    main()

"""The cost model of paths.py against measurement: one layer's norm, clipped sum and update, at shapes from a seed.

python benchmarks/kernels/bench_paths.py --seed 7 --shapes 24      # bf16, float32 and TF32 in turn; about a minute
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import torch
from torch import Tensor
from triton.testing import do_bench

from dpscope.flash.kernels.fused_update import fused_adam_
from dpscope.flash.kernels.gram_norms import GramUnit, gram_norms_squared
from dpscope.flash.kernels.kept_gradients import kept_norms_squared
from dpscope.flash.kernels.scaled_sum import scaled_sums
from dpscope.flash.layers.linear import per_sample_gradients
from dpscope.flash.contributions import Outer
from dpscope.flash.paths import DIRECT, GRAM, KEEP, choose_path

LAYERS = 4  # of one shape, as in a model: one launch for all where the engine makes one
DTYPES = ("bf16", "fp32", "tf32")
MOST_BYTES = 12e9


def draw_shape(chance: random.Random) -> tuple[str, int, int, int, int]:
    """dtype, batch, length, d, p: widths in steps of 64, sometimes a vocabulary, lengths from 64 to 8192."""
    while True:
        dtype = chance.choice(DTYPES)
        itemsize = 2 if dtype == "bf16" else 4
        length = 8 * round(2 ** chance.uniform(6, 13) / 8)
        batch = max(2, round(2 ** chance.uniform(11, 14.5)) // length)
        d, p = (64 * round(2 ** chance.uniform(8, 13) / 64) for _ in range(2))
        p = chance.choice((p, p, p, 32000))
        held = LAYERS * batch * (length * (d + p) + 2 * d * p) * itemsize
        if held < MOST_BYTES and 2.0 * batch * length * d * p < (6e12 if itemsize == 2 else 6e11):
            return dtype, batch, length, d, p


def calls(xs: list[Tensor], gs: list[Tensor]) -> dict[str, Callable[[], None]]:
    (batch, _, d), p = xs[0].shape, gs[0].shape[-1]
    scale = torch.rand(batch, device="cuda")
    params, firsts, seconds = ([torch.zeros(p, d, device="cuda") for _ in xs] for _ in range(3))

    def update(sums: list[Tensor], factors: Tensor | None = None) -> None:
        fused_adam_(params, sums, firsts, seconds, step=3, lr=1e-9, noise_std=1.0, factors=factors)

    def keep() -> None:
        values = [per_sample_gradients(x, g, torch.float32) for x, g in zip(xs, gs, strict=True)]
        kept_norms_squared(values)
        update(values, scale)

    def gram() -> None:
        gram_norms_squared([GramUnit(gs=(g,), xs=(x,)) for x, g in zip(xs, gs, strict=True)])
        update(scaled_sums(gs, xs, scale))

    def direct() -> None:
        for x, g in zip(xs, gs, strict=True):
            Outer(x, g).norms_squared()
        update(scaled_sums(gs, xs, scale))

    return {KEEP: keep, GRAM: gram, DIRECT: direct}

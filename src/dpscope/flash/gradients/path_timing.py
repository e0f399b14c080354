"""Measured time of each path of a product on this device: norms and clipped sum of random operands of its shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from dpscope.flash.gradients.contributions import Outer, kept_products, outer_sums
from dpscope.flash.gradients.paths import DIRECT, GRAM, KEEP, RANK1, Product, choose_path
from dpscope.flash.kernels.float32_products import reads_tf32, truncated_to_tf32
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit

SHORTEST_RUN = 0.05  # seconds that a path is repeated for


def time_paths(x: Sequence[int], p: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Measure seconds of each path for x: (B, T, d) and g: (B, T, p); infinite if memory ran out."""
    generator = torch.Generator(device).manual_seed(0)
    taken: dict[str, float] = {}
    try:
        left, right = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in (x, (*x[:2], p)))
        calls = _calls(
            Outer(left, right, choose_path(Product(x[0], x[1], x[2], p))),
            torch.rand(x[0], generator=generator, device=device),
        )
    except torch.OutOfMemoryError:
        return dict.fromkeys((GRAM, DIRECT, KEEP), math.inf)
    for path, call in calls.items():
        try:
            call()  # compiled, if it is to be
            timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            taken[path] = timer.blocked_autorange(min_run_time=SHORTEST_RUN).median
        except torch.OutOfMemoryError:
            taken[path] = math.inf
    return taken


def _calls(product: Outer, scale: Tensor) -> dict[str, Callable[[], object]]:
    """Return the paths that are exact for the product, each from its operands to the clipped sum."""
    x, g = product.x, product.g
    scale = scale.to(torch.promote_types(torch.float32, g.dtype))
    in_tf32 = g.dtype == torch.float32 and reads_tf32(g.device)

    def keep() -> None:
        kept = kept_products(x, g)
        kept.norms_squared()
        kept.clipped_sum(scale, None)

    def gram() -> None:
        taken = Outer(truncated_to_tf32(x), truncated_to_tf32(g), product.decision) if in_tf32 else product
        gram_norms_squared([GramUnit(gs=(taken.g,), xs=(taken.x,), in_tf32=in_tf32)])
        outer_sums([taken], scale, [None])

    def direct() -> None:
        product.norms_squared()
        outer_sums([product], scale, [None])

    def rank1() -> None:
        product.rank1_norms_squared()
        outer_sums([product], scale, [None])

    return {**({RANK1: rank1} if x.shape[1] == 1 else {}), GRAM: gram, DIRECT: direct, KEEP: keep}

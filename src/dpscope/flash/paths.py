"""Which way a layer's per-sample norms are taken: a cost model over shapes, and nothing else.

A layer that saw x: (B, T, d) and g: (B, T, p) has per-sample weight gradients g_bᵀ x_b (p×d). Norm and clipped sum
together cost, in multiply-adds counted as two operations:

| path   | operations            | bytes moved besides the operands                    | bytes held until the sum |
| ------ | --------------------- | --------------------------------------------------- | ------------------------ |
| rank-1 | 2BTdp + 2BT(d+p)      | the narrower operand scaled: read and written       | x and g                  |
| gram   | 2BTdp + BT²(d+p)      | the same                                            | x and g                  |
| direct | 4BTdp                 | the same; per-sample gradients written and read     | x and g                  |
| keep   | 2BTdp                 | per-sample gradients written, read twice; the sum   | per-sample gradients     |

(Half of a Gram matrix is enough, by symmetry: T²(d+p) and not 2T²(d+p).) `keep` is a candidate only where the
per-sample gradients take no more memory than the x and g they replace, times `memory_allowance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

RANK1, GRAM, DIRECT, KEEP = "rank-1", "gram", "direct", "keep"
FORCEABLE = (GRAM, DIRECT, KEEP)

# Samples with more ids than this are normed by adding up the rows that repeat, which are found by sorting; those of
# shorter ones meet in the Gram kernel, all embeddings' in one launch.
LONGEST_GRAM_LOOKUP = 256

# Sustained rates of an H200 (measured 2026-11-15): dense GEMMs by the bytes of an element, device memory, and what a
# triangular Gram kernel reaches of the GEMM rate. Only their ratios decide, and those differ little between devices.
OPERATIONS_PER_SECOND: Mapping[int, float] = MappingProxyType({2: 7e14, 4: 5e13, 8: 3e13})
BYTES_PER_SECOND = 4e12
GRAM_EFFICIENCY = 0.6


@dataclass(frozen=True)
class PathCost:
    operations: float
    bytes_moved: float
    bytes_held: float
    seconds: float


@dataclass(frozen=True)
class Decision:
    """The path taken, why, and what each path was predicted to cost (norm and clipped sum together)."""

    path: str
    reason: str
    costs: Mapping[str, PathCost] = field(default_factory=dict)


LOOKUP_KEPT = Decision(KEEP, "one sample: its gradient is the gradient")
LOOKUP_SORTED = Decision(DIRECT, "rows that repeat in a sample are found by sorting, and add up first")
LOOKUP_COMPARED = Decision(GRAM, f"at most {LONGEST_GRAM_LOOKUP} ids a sample, compared in the Gram kernel")


def path_costs(
    batch: int, length: int, d: int, p: int, itemsize: int, x_held: int | None = None
) -> dict[str, PathCost]:
    """`x_held`: elements of x a sample where x is unfolded from something smaller (a convolution's input)."""
    rate = OPERATIONS_PER_SECOND.get(itemsize, OPERATIONS_PER_SECOND[4])
    gemm = 2.0 * batch * length * d * p
    held = float(batch * ((length * d if x_held is None else x_held) + length * p) * itemsize)
    unfolded = 0.0 if x_held is None else 2.0 * batch * length * d * itemsize  # written and read
    gradients = float(batch * d * p * itemsize)
    scaled = 2.0 * batch * length * min(d, p) * itemsize
    summed = 8.0 * batch * d * p  # the float32 sum is read and written once a sample

    def cost(operations: float, moved: float, kept: float, norm_rate: float = rate) -> PathCost:
        seconds = gemm / rate + (operations - gemm) / norm_rate + moved / BYTES_PER_SECOND
        return PathCost(operations, moved, kept, seconds)

    return {
        RANK1: cost(gemm + 2.0 * batch * length * (d + p), scaled + held + 2 * unfolded, held),
        GRAM: cost(gemm + float(batch) * length**2 * (d + p), scaled + 2 * unfolded, held, rate * GRAM_EFFICIENCY),
        DIRECT: cost(2 * gemm, scaled + 2 * gradients + 2 * unfolded, held),
        KEEP: cost(gemm, 3 * gradients + summed + unfolded, gradients),
    }


@lru_cache(maxsize=4096)
def choose_path(
    batch: int,
    length: int,
    d: int,
    p: int,
    *,
    itemsize: int = 4,
    forced: str | None = None,
    memory_allowance: float = 1.0,
    x_held: int | None = None,
) -> Decision:
    """The cheapest exact path for x: (batch, length, d) and g: (batch, length, p). Pure: shapes in, decision out."""
    costs = MappingProxyType(path_costs(batch, length, d, p, itemsize, x_held))
    if forced is not None:
        if forced not in FORCEABLE:
            raise ValueError(f"path {forced!r} is not one of {', '.join(FORCEABLE)}")
        return Decision(forced, "forced by the caller", costs)
    if batch == 1:
        return Decision(KEEP, "one sample: its gradient is the gradient, no second GEMM", costs)
    if length == 1:
        return Decision(RANK1, "one position a sample: |g xᵀ|² = |x|²|g|²", costs)
    allowed = {GRAM: costs[GRAM], DIRECT: costs[DIRECT]}
    if costs[KEEP].bytes_held <= memory_allowance * costs[GRAM].bytes_held:
        allowed[KEEP] = costs[KEEP]
    best = min(allowed, key=lambda name: allowed[name].seconds)
    predicted = ", ".join(f"{name} {cost.seconds * 1e6:.2g} µs" for name, cost in allowed.items())
    left_out = "" if KEEP in allowed else "; keep would hold more memory than x and g"
    return Decision(best, f"cheapest of {predicted}{left_out}", costs)


@dataclass(frozen=True)
class PathRules:
    """How an engine chooses: a path forced on every layer, or the cheapest within what may be held."""

    forced: str | None = None
    memory_allowance: float = 1.0

    def of_product(self, x: Sequence[int], p: int, *, itemsize: int, x_held: int | None = None) -> Decision:
        """Of a layer with x: (batch, length, d) and g: (batch, length, p)."""
        return choose_path(
            *x,
            p,
            itemsize=itemsize,
            forced=self.forced,
            memory_allowance=self.memory_allowance,
            x_held=x_held,
        )

    def of_lookup(self, batch: int, length: int) -> Decision:
        """Of an embedding with ids: (batch, length)."""
        if self.forced is None and batch == 1:
            return LOOKUP_KEPT
        return LOOKUP_SORTED if self.forced == DIRECT or length > LONGEST_GRAM_LOOKUP else LOOKUP_COMPARED

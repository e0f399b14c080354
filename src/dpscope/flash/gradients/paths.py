"""Paths of per-sample norms: a cost model over shapes chooses one for each layer, given the room for kept gradients.

A layer that saw x: (B, T, d) and g: (B, T, p) has per-sample weight gradients g_bᵀ x_b (p×d). Norm, clipped sum and the
update's reading of it cost, in multiply-adds counted as two operations:

| path   | operations            | bytes moved besides the operands                      | bytes held until the sum |
| ------ | --------------------- | ----------------------------------------------------- | ------------------------ |
| rank-1 | 2BTdp + 2BT(d+p)      | operands read once more; the sum written and read     | x and g                  |
| gram   | 2BTdp + BT²(d+p)      | the sum written and read                              | x and g                  |
| direct | 4BTdp                 | the same; per-sample gradients written and read       | x and g                  |
| keep   | 2BTdp                 | per-sample gradients written and read once or twice   | per-sample gradients     |

Kept gradients are read by the update and, unless their product takes the norms as it writes them
(kernels/sample_products.py), for their norms. Half of a Gram matrix is enough, by symmetry: T²(d+p) and not 2T²(d+p);
it is made of whole tiles, though. Per-sample gradients are stored in the dtype of x and g, but in float32 instead of
float16. Other samples may change the path, but must not change whether a gradient overflows.

`keep` is a candidate if the per-sample gradients take no more memory than what they replace, or if they fit
(memory_budget.py). They replace the output gradient, and x unless another layer reads it, too, as q, k and v do.
Nothing is kept in a checkpointed block that will run again, because products for the norm would be dropped with the
rest.

Where the operands of float32 products are rounded (TF32), norm and sum have to be of the same rounded products.
`direct` and `keep` make them. `gram` uses copies of x and g that are rounded already, which a product in TF32 does not
change. It is no candidate if the sum is made of other tensors (a convolution's patches, a block that runs again), or if
the device may round but need not (a CPU).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from dpscope.flash.gradients.memory_budget import LEAN, MemoryBudget
from dpscope.flash.kernels.float32_products import TF32_ROUNDING, operand_rounding, reads_tf32

RANK1, GRAM, DIRECT, KEEP = "rank-1", "gram", "direct", "keep"
FORCEABLE = (GRAM, DIRECT, KEEP)
# Memory that kept per-sample gradients may take: none, because they are in a checkpointed block that makes x and g once
# more for the sum; as much as x and g; or whatever they need.
Room = Literal["none", "freed", "more"]

# Samples with more ids than this are normed by adding up the rows that repeat, which are found by sorting; those of
# shorter ones meet in the Gram kernel, all embeddings' in one launch.
LONGEST_GRAM_LOOKUP = 256


@dataclass(frozen=True)
class Rates:
    """Rates that a device sustains on one kind of operands."""

    products: float  # operations a second
    gram: float  # the same, in the tiles of Gram matrices
    tile: int  # positions


# Of an H200 (2026-11-15, preset 1b), by the bytes of an element. In bf16: products of weights 22.9 ms at 8 × 1024, Gram
# norms 22.7 ms at 16 × 1024 and 2.0 ms at 16 × 256. In float32: Gram norms at 65 TFLOP/s, by three products of tf32
# halves. Only ratios decide, and those differ little between devices. benchmarks/kernels/bench_paths.py checks them.
DEVICE_RATES: Mapping[int, Rates] = MappingProxyType(
    {2: Rates(7.6e14, 5.9e14, 128), 4: Rates(5e13, 6.5e13, 64), 8: Rates(3e13, 3e13, 512)}
)
TF32_RATES = Rates(3e14, 2.5e14, 128)
# Operations a second of the kernel for windows, in TF32 and half precision: 8e13 at 49 positions, 1.4e14 at 784
# (H200, 2026-11-18, benchmarks/kernels/bench_conv_products.py). Gram norms of patches are a layer's own launches.
CONV_RATE = 1e14
PATCHES_LAUNCHES = 2e-4  # seconds of the host
BYTES_PER_SECOND = 4.2e12
SUM_EFFICIENCY = 0.95  # of the products' rate: products with factors, in one launch
NORMED_LAUNCH = 2e-5  # seconds that the host gives to a kernel of its own, where Gram norms of all layers share one
DIRECT_LAUNCHES = 1e-4  # and to eight of them: products for norms alone are made, squared and added up layer by layer
SHARING = 16  # layers that may read one x, and free it together by keeping their gradients


@dataclass(frozen=True)
class PathCost:
    operations: float
    bytes_moved: float
    bytes_held: float
    seconds: float

    def __str__(self) -> str:
        return in_microseconds(self.seconds)


def in_microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds >= 1e-5 else f"{seconds * 1e6:.2g} µs"


@dataclass(frozen=True)
class Decision:
    """The path that a layer's norms and clipped sum take, and why.

    Args:
        path: "rank-1", "gram", "direct" or "keep".
        reason: Why this path was chosen, in words.
        costs: Path -> predicted cost of norm, clipped sum and the update's reading of it.
        kept_if_held: Bytes that would be kept if a checkpointed block were held instead of running again.
        dtype: Number format of the output gradient, if costs are those of a product.

    Example:
        >>> decision = choose_path(Product(16, 1, 1024, 1024))
        >>> print(decision.path, "because of", decision.reason)
        rank-1 because of one position a sample: |g xᵀ|² = |x|²|g|²
    """

    path: str
    reason: str
    costs: Mapping[str, PathCost] = field(default_factory=dict)
    kept_if_held: float | None = None
    dtype: torch.dtype | None = None


LOOKUP_KEPT = Decision(KEEP, "one sample: its gradient is the gradient")
LOOKUP_SORTED = Decision(DIRECT, "rows that repeat in a sample are found by sorting, and add up first")
LOOKUP_COMPARED = Decision(GRAM, f"at most {LONGEST_GRAM_LOOKUP} ids a sample, compared in the Gram kernel")


class Unfolded(NamedTuple):
    """A convolution's x: elements held a sample; whether patches are copies; whether products are in TF32.

    by_kernel: products need no patches, come with their norms, and are rounded alike on every path
    (kernels/conv_products.py). Otherwise only those that are kept are in TF32. groups: how many such products it has.
    """

    held: int
    copies: bool
    kept_in_tf32: bool
    by_kernel: bool = False
    groups: int = 1


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which per-sample gradients are stored."""
    return torch.float32 if dtype == torch.float16 else dtype


def _rounding_of(g: Tensor) -> float:
    """Return the rounding of the operands of g's products.

    Those of float16 are made in float32: TF32 holds float16, bfloat16 does not.
    """
    if g.dtype not in (torch.float32, torch.float16):
        return 0.0
    rounding = operand_rounding(g.device)
    return rounding if g.dtype == torch.float32 or rounding > TF32_ROUNDING else 0.0


def exact_path(path: str, g: Tensor) -> str:
    """Return the path chosen in backward, or `direct` if torch has begun to round operands since."""
    if path not in (GRAM, RANK1):
        return path
    return DIRECT if _rounding_of(g) > (0.0 if path == GRAM else TF32_ROUNDING) else path


def tied_decision(decision: Decision, g: Tensor) -> Decision:
    """Return the path of a head whose weight an embedding uses, too, given the head's own.

    If products are rounded, rank-1 is not exact, because the uses may cancel. Nor is gram, because its cross term is
    computed from values that are not rounded.
    """
    rounded = exact_path(GRAM, g) != GRAM
    instead = {RANK1: KEEP, GRAM: DIRECT} if rounded else {}
    return replace(decision, path=instead.get(decision.path, decision.path))


def tiled_square(length: int, tile: int) -> int:
    """Return T² for a Gram matrix whose lower half is made of whole tiles."""
    side = min(tile, 64 * math.ceil(max(1, length) / 64))
    tiles = math.ceil(length / side)
    return tiles * (tiles + 1) * side**2


class Product(NamedTuple):
    """The product of a layer with input x: (B, T, d) and output gradient g: (B, T, p).

    Args:
        batch: Number of samples B.
        length: Positions of a sample T.
        d: Input features.
        p: Output features.
        itemsize: Bytes of an element of x and g.
        stored_itemsize: Bytes of an element of per-sample gradients that are kept, if not `itemsize`.
        rounding: Relative rounding of float32 operands, such as 2⁻¹¹ for TF32; 0 if they are not rounded.
        in_tf32: The device's products leave operands unchanged that are in TF32 already.
        unfolded: Description of a convolution's x, which is made of patches of its input.
        width_freed: Features that are freed once per-sample gradients are kept: those of g and, if no other layer
            reads it, those of x. Default: `p`.
        normed: The product that writes kept gradients also takes their norms.
        reduced: The gradient travels block by block, so keeping a single sample's gradient is not free.

    Example:
        >>> print(choose_path(Product(16, 1024, 4096, 4096, itemsize=2)).path)
        gram
    """

    batch: int
    length: int
    d: int
    p: int
    itemsize: int = 4
    stored_itemsize: int | None = None
    rounding: float = 0.0
    in_tf32: bool = True
    unfolded: Unfolded | None = None
    width_freed: int | None = None
    normed: bool = False
    reduced: bool = False

    @property
    def is_smaller_by_group(self) -> bool:
        """True if the per-sample gradients of several groups take no more memory than x and g."""
        if self.unfolded is None or self.unfolded.groups == 1:
            return False
        groups, freed = self.unfolded.groups, self.unfolded.held + self.length * self.p * self.unfolded.groups
        return groups * self.d * self.p * (self.stored_itemsize or self.itemsize) <= freed * self.itemsize

    @property
    def allows_gram(self) -> bool:
        """True if a Gram norm is that of the products that are summed."""
        if self.unfolded is not None and self.unfolded.by_kernel:
            return not self.unfolded.kept_in_tf32
        return not self.rounding or (self.rounding <= TF32_ROUNDING and self.in_tf32 and self.unfolded is None)


def path_costs(product: Product) -> dict[str, PathCost]:
    """Return the predicted cost of each path."""
    batch, length, d, p, itemsize = product.batch, product.length, product.d, product.p, product.itemsize
    rounding, unfolded, normed = product.rounding, product.unfolded, product.normed
    rates = TF32_RATES if rounding else DEVICE_RATES.get(itemsize, DEVICE_RATES[4])
    products = 2.0 * batch * length * d * p
    by_kernel, in_tf32 = (unfolded.by_kernel, unfolded.kept_in_tf32) if unfolded else (False, False)
    rate = CONV_RATE if by_kernel and (in_tf32 or itemsize < 4) else rates.products
    gemm = products / rate
    sums = gemm if by_kernel else gemm / SUM_EFFICIENCY
    grams = float(batch) * (d + p)
    held = float(batch * ((length * d if unfolded is None else unfolded.held) + length * p) * itemsize)
    patches = 2.0 * batch * length * d * itemsize if unfolded and unfolded.copies else 0.0  # written and read
    unfolds = 0.0 if by_kernel else patches  # for a product
    kept = products / TF32_RATES.products if in_tf32 and not by_kernel else gemm
    stored = float(batch * d * p * (product.stored_itemsize or itemsize))
    wide = 0.0 if by_kernel else float(batch * d * p * max(itemsize, 4))  # products for the norm alone: not rounded
    again = 2 * wide if rounding else 0.0  # rounded products are made sample by sample for the sum as well
    copies = 2 * held if rounding else 0.0  # of x and g, rounded
    total = 2.0 * d * p * max(itemsize, 4)  # the sum, written and read

    def cost(operations: float, moved: float, kept: float, seconds: float) -> PathCost:
        return PathCost(operations, moved, kept, seconds + moved / BYTES_PER_SECOND)

    in_tiles = grams * tiled_square(length, rates.tile) / rates.gram + (PATCHES_LAUNCHES if by_kernel else 0.0)
    return {
        RANK1: cost(products + 2.0 * length * grams, total + held + patches + unfolds, held, sums),
        GRAM: cost(products + length**2 * grams, total + again + copies + patches + unfolds, held, sums + in_tiles),
        DIRECT: cost(
            2 * products,
            total + 2 * wide + again + 2 * unfolds,
            held,
            gemm + sums + (0.0 if by_kernel else DIRECT_LAUNCHES),
        ),
        KEEP: cost(
            products,
            (2 if normed or by_kernel else 3) * stored + unfolds,
            stored,
            kept + (NORMED_LAUNCH if normed else 0.0),
        ),
    }


@lru_cache(maxsize=4096)
def choose_path(product: Product, room: Room = "freed", forced: str | None = None) -> Decision:
    """Choose the cheapest exact path of a layer's product.

    Args:
        product: Shapes and number formats of the product.
        room: Memory that kept per-sample gradients may take: "none", as much as x and g ("freed"), or "more".
        forced: Path to use in any case, for tests: "gram", "direct" or "keep".

    Returns:
        The path, the reason, and the predicted cost of each path.

    Raises:
        ValueError: `forced` is no path.

    Example:
        >>> print(choose_path(Product(16, 1024, 4096, 4096, itemsize=2)).path)
        gram
    """
    costs, runs_again = MappingProxyType(path_costs(product)), room == "none"
    # A block that runs again sums other tensors than those that were rounded for a Gram norm.
    rounded_gram = product.allows_gram and not (product.rounding and runs_again)
    if forced is not None:
        if forced not in FORCEABLE:
            raise ValueError(f"path {forced!r} is not one of {', '.join(FORCEABLE)}")
        if forced == GRAM and not rounded_gram:
            return Decision(DIRECT, "gram was asked for, but products are rounded (TF32): norms are of those", costs)
        return Decision(forced, "forced by the caller", costs)
    if product.is_smaller_by_group:
        assert product.unfolded is not None
        reason = f"{product.unfolded.groups} groups: per-sample gradients are smaller than x and g"
        return Decision(KEEP, reason, costs)
    if product.batch == 1 and not product.reduced:
        return Decision(KEEP, "one sample: its gradient is the gradient, no second GEMM", costs)
    if product.length == 1 and product.rounding <= TF32_ROUNDING:
        return Decision(RANK1, "one position a sample: |g xᵀ|² = |x|²|g|²", costs)
    allowed = {name: costs[name] for name in ((GRAM, DIRECT) if rounded_gram else (DIRECT,))}
    width = product.p if product.width_freed is None else product.width_freed
    freed = product.batch * product.length * max(width, product.d // SHARING) * product.itemsize
    if room == "more" or (room == "freed" and costs[KEEP].bytes_held <= freed):
        allowed[KEEP] = costs[KEEP]
    best = min(allowed, key=lambda name: allowed[name].seconds)
    reason = f"cheapest of {', '.join(f'{name} {cost}' for name, cost in allowed.items())}"
    if runs_again:
        reason += "; nothing is kept in its checkpointed block, which runs again for the sum, or is held in less memory"
    elif KEEP not in allowed:
        reason += f"; keep ({costs[KEEP]}) would take more memory than it frees, and has no room"
    if product.rounding:
        reason += "; products are rounded (TF32), and norms are of those"
    return Decision(best, reason, costs)


@lru_cache(maxsize=4096)  # asked by every layer in every backward pass
def _choices(
    x: Sequence[int],
    p: int,
    dtype: torch.dtype,
    forced: str | None,
    runs_again: bool,
    rounding: float,
    in_tf32: bool,
    unfolded: Unfolded | None,
    width_freed: int | None,
    normed: bool,
    reduced: bool,
) -> tuple[Decision, Decision, float]:
    """Return the decision with room to keep, the decision without, and the bytes of room that are needed.

    x: (batch, length, d); the others are as in `Product`.
    """
    alone = reduced and x[0] == 1  # a lone sample's gradient is stored in the parameter's dtype
    stored = max(4, dtype.itemsize) if alone else stored_dtype(dtype).itemsize
    batch, length, d = x
    sizes = batch, length, d, p, dtype.itemsize, stored
    product = Product(*sizes, rounding, in_tf32, unfolded, width_freed, normed, reduced)
    choose = partial(choose_path, product, forced=forced)
    if runs_again:
        held, again = choose("freed"), choose("none")
        kept = held.costs[KEEP].bytes_held if held.path == KEEP else None
        again = replace(again, kept_if_held=kept, dtype=dtype)
        return again, again, 0.0
    fitting = replace(choose("more"), dtype=dtype)
    lean = fitting if forced is not None or fitting.path != KEEP else replace(choose("freed"), dtype=dtype)
    if lean is fitting or lean.path == KEEP:
        return lean, lean, 0.0
    # Besides, autograd casts the gradient of a half-precision x to float32; in float32 its largest next step is that of
    # attention, which makes three of x's size next to it.
    beside = 4 if dtype.itemsize < 4 else 4 * dtype.itemsize
    inputs = product.batch * product.length * product.d
    return fitting, lean, fitting.costs[KEEP].bytes_held + inputs * beside


class PathRules:
    """Rules by which an engine chooses: a path forced on every layer, or the cheapest for which there is room.

    reduced     gradients travel block by block
    runs_again  tells whether the layers that ask are in a checkpointed block that runs again, or is to
    """

    def __init__(
        self,
        forced: str | None = None,
        budget: MemoryBudget | None = None,
        *,
        reduced: bool = False,
        runs_again: Callable[[], bool] = bool,
    ) -> None:
        self.forced, self.reduced, self.runs_again = forced, reduced, runs_again
        self.budget = budget or MemoryBudget(LEAN, ())
        # By the address of an x that a layer has read in this micro-batch: that x, while it lives, and the layer.
        self.readers: dict[int, tuple[ref[Tensor], Any]] = {}
        self._largest_copy = 0.0  # bytes of x and g of a product, of which Gram norms of TF32's products take copies

    def of_product(
        self,
        x: Sequence[int],
        g: Tensor,
        *,
        p: int | None = None,
        unfolded: Unfolded | None = None,
        width_freed: int | None = None,
        normed: bool = False,
    ) -> Decision:
        """Decide for a layer with x: (batch, length, d) and g: (batch, length, p). Give `p` if g has another shape."""
        rounding = 0.0 if unfolded is not None and unfolded.by_kernel else _rounding_of(g)
        in_tf32, p = bool(rounding) and reads_tf32(g.device), g.shape[-1] if p is None else p
        how = self.forced, self.runs_again(), rounding, in_tf32, unfolded, width_freed, normed, self.reduced
        fitting, lean, more = _choices(x, p, g.dtype, *how)
        if rounding and lean.path == GRAM:
            self._largest_copy = max(self._largest_copy, lean.costs[GRAM].bytes_held)
            more += self._largest_copy
        return fitting if fitting is lean or self.budget.fits(more) else lean

    def close(self) -> None:
        """Forget tensor addresses, which the next micro-batch may reuse."""
        self.budget.close()
        self.readers.clear()

    def of_lookup(self, batch: int, length: int) -> Decision:
        """Decide for an embedding with ids: (batch, length)."""
        if self.forced is None and batch == 1 and not self.reduced:
            return LOOKUP_KEPT
        return LOOKUP_SORTED if self.forced == DIRECT or length > LONGEST_GRAM_LOOKUP else LOOKUP_COMPARED

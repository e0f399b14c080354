"""Which checkpointed blocks are held and which are recomputed, and why; blocks are told by their place in the forward.

    | block      | held from backward to the sums     | besides one backward pass                         |
    | ---------- | ---------------------------------- | ------------------------------------------------- |
    | held       | x and g of its layers              |                                                   |
    | recomputed | its input, its outputs' gradients  | one forward, one backward                         |

With a budget of "lean" every block is recomputed that takes less so. With a number of bytes blocks are held as long as
all that is to come fits besides: the boundaries of blocks that backward has not reached, the sums of those that are
recomputed, and one block at work. What a block takes is known from the last micro-batch that recomputed it with samples
of the same shape; the first one recomputes all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from dpscope.flash.explanation import BlockRow
from dpscope.flash.memory_budget import MemoryBudget
from dpscope.flash.recomputation import BlockPass

IS_HELD, IS_RECOMPUTED = "held", "recomputed"


@dataclass
class BlockCost:
    """Bytes of a block in the last micro-batch that recomputed it, of `samples` of one `shape`."""

    shape: Any
    samples: int
    held: int  # x and g of its layers
    boundary: int  # its input and its outputs' gradients
    sums: int
    activations: int = 0  # what its forward adds to what is live

    def of(self, samples: int) -> BlockCost:
        """The same for another number of samples."""
        held, boundary, activations = (
            each * samples // self.samples for each in (self.held, self.boundary, self.activations)
        )
        return BlockCost(self.shape, samples, held, boundary, self.sums, activations)


class BlockChoices:
    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._costs: dict[int, BlockCost] = {}
        self._choices: dict[int, tuple[str, str]] = {}  # the last ones
        self._shared: dict[int, str] = {}  # blocks whose parameters are used elsewhere, too
        self._names: dict[int, list[str]] = {}  # what the names of their layers have in common

    @property
    def rows(self) -> list[BlockRow]:
        """For explain(), in the order of the forward pass."""
        return [BlockRow(self.name(index), *self._choices[index]) for index in sorted(self._choices)]

    def name(self, index: int) -> str:
        return ".".join(self._names.get(index, ())) or f"number {index}"

    def note_layer(self, index: int, layer: str) -> None:
        parts = layer.split(".")
        pairs = zip(parts, self._names.get(index, parts), strict=False)
        self._names[index] = [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def hold(self, index: int, why: str) -> None:
        self._choices[index] = (IS_HELD, why)

    def hold_shared(self, index: int, why: str) -> None:
        """Hold the block, from now on always."""
        self._shared[index] = why
        self.hold(index, why)

    def is_held(self, index: int, samples: int, shape: Any, reached: Collection[int]) -> bool:
        """Decide on a block that backward reaches, after those that are `reached` and recomputed.

        shape: whatever has to be the same for a block to take as much for a sample as before
        """
        held, why = self._choose(index, samples, shape, reached)
        self._choices[index] = (IS_HELD if held else IS_RECOMPUTED, why)
        return held

    def _choose(self, index: int, samples: int, shape: Any, reached: Collection[int]) -> tuple[bool, str]:
        if index in self._shared:
            return True, self._shared[index]
        if samples < 2:
            return True, "one sample: its gradients are the gradient"
        known = self._costs.get(index)
        if known is None or known.shape != shape:
            return False, "the first time, to see what it takes"
        cost = known.of(samples)
        if cost.held <= cost.boundary:
            return True, f"its layers hold {cost.held} bytes, its input and output gradients are {cost.boundary}"
        return self._fits(index, cost, reached)

    def _fits(self, index: int, cost: BlockCost, reached: Collection[int]) -> tuple[bool, str]:
        """Whether there is room to hold the block, and why it is held or not."""
        saved = f"{cost.boundary} bytes are held, not {cost.held}"
        limit, now = self._budget.limit, self._budget.allocated()
        if limit is None or isinstance(limit, str) or now is None:
            return False, saved
        needed = now.current + self._to_come(index, cost.samples, reached)
        if needed + cost.held <= limit:
            return True, f"it fits the memory budget: about {needed + cost.held} of {limit:.0f} bytes"
        if needed + cost.sums > limit:
            saved += f"; the leanest step takes about {needed + cost.sums} bytes, the memory budget is {limit:.0f}"
        return False, saved

    def _to_come(self, index: int, samples: int, reached: Collection[int]) -> int:
        """Bytes that other blocks will take besides what is live."""
        costs = {i: cost.of(samples) for i, cost in self._costs.items()}
        others = {i: cost for i, cost in costs.items() if i != index and self._is_recomputed(i)}
        boundaries = sum(cost.boundary for i, cost in others.items() if i not in reached)
        return boundaries + sum(c.sums for c in others.values()) + max(c.activations for c in costs.values())

    def _is_recomputed(self, index: int) -> bool:
        """Of a block that backward has not reached yet, the micro-batch before says it."""
        return self._choices.get(index, (IS_RECOMPUTED,))[0] == IS_RECOMPUTED

    # -- what a block takes ------------------------------------------------------------------------------------------

    def note_cost(self, each: BlockPass, samples: int, shape: Any) -> None:
        """Of a pass whose norms are about to be taken."""
        before = self._costs.get(each.index)
        sums = sum(4 * slot.parameter.numel() for slot in each.gathered)
        activations = before.of(samples).activations if before is not None else 0
        self._costs[each.index] = BlockCost(shape, samples, each.bytes_if_held, each.boundary_bytes, sums, activations)

    def before_forward(self, index: int) -> Callable[[], None]:
        """To be called when the block has run forward."""
        before = self._budget.allocated()

        def after_forward() -> None:
            now = self._budget.allocated()
            if before is not None and now is not None:
                self._costs[index].activations = max(0, now.current - before.current)

        return after_forward

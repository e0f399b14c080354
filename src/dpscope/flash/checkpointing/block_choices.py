"""Choice of the checkpointed blocks to hold and to recompute. A block is known by its place in the forward.

    | block      | held from backward to the sums     | besides one backward pass                         |
    | ---------- | ---------------------------------- | ------------------------------------------------- |
    | held       | x and g of its layers              |                                                   |
    | recomputed | its input, its outputs' gradients  | one forward, one backward                         |
    | summed     | the clipped sums of its layers     |                                                   |

A block is summed if the clipping rule's groups lie inside it (`per_layer`), so that its factors need no other layer.

When a micro-batch is closed, all held layers are summed before any block runs again, so sums replace x and g. The
backward pass therefore decides. It reaches the blocks one after the other and needs, in addition to what is live at
that point:

    that block      if it is held, x and g less its outputs' gradients and the input that was made for it
    each to come    its outputs' gradients; its input is live already, and stays
    one of them     what its forward makes, and the gradients of its layers: the block at work

A block is held if all of that fits: a number of bytes, or with "lean" the peak of ordinary training (memory_budget.py).
Last blocks are reached first. The memory of a block is known from the last micro-batch that recomputed it with samples
of the same shape; the first one recomputes all, and so does "lean" on devices without memory tracking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor

from dpscope.flash.checkpointing.recomputation import BlockPass, bytes_of, gradient_of
from dpscope.flash.gradients.memory_budget import LEAN, MemoryBudget

IS_HELD, IS_RECOMPUTED, IS_SUMMED = "held", "recomputed", "summed"


@dataclass(frozen=True)
class BlockRow:
    """Row of `explain()`: contributions of the block's layers are held or summed, or the block runs again."""

    block: str
    how: str  # "held", "recomputed" or "summed"
    why: str


@dataclass(frozen=True)
class BlockCost:
    """Bytes of a block in the last micro-batch that recomputed it, of `samples` of one `shape`."""

    shape: Any
    samples: int
    held: int  # x and g of its layers, or per-sample gradients
    kept: int  # where each layer keeps those if they take no more than its own x and g
    inputs: int
    freed: int  # of the inputs: those that nothing else needs once backward has left the block
    grads: int  # of its outputs
    activations: int  # what its forward adds to what is live
    gradients: int  # g of its layers
    sums: int  # of its parameters

    @property
    def boundary(self) -> int:
        return self.inputs + self.grads

    @property
    def at_work(self) -> int:
        """The most that is held while backward is in the block: no g is freed before the block's norms are taken."""
        return self.activations + self.gradients

    def of(self, samples: int) -> BlockCost:
        """Return the cost for another number of samples."""
        if samples == self.samples:
            return self
        scaled = {name: getattr(self, name) * samples // self.samples for name in _FOR_EACH_SAMPLE}
        return BlockCost(self.shape, samples, **scaled, sums=self.sums)


_FOR_EACH_SAMPLE = ("held", "kept", "inputs", "freed", "grads", "activations", "gradients")


class BlockChoices:
    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._costs: dict[int, BlockCost] = {}
        self._choices: dict[int, tuple[str, str]] = {}  # the last ones
        self._reached: set[int] = set()  # by backward, in this micro-batch
        self._leanest_to_come = 0
        # Blocks whose parameters were used nowhere else when their samples had this shape.
        self.apart: dict[int, Any] = {}
        self._across: set[int] = set()  # blocks of which a group of the clipping rule has only a part
        self._shared: dict[int, str] = {}  # blocks whose parameters are used elsewhere, too
        self._layers: set[tuple[int, str]] = set()
        self._names: dict[int, list[str]] = {}  # what the names of their layers have in common

    @property
    def rows(self) -> list[BlockRow]:
        """For explain(), in the order of the forward pass."""
        return [BlockRow(self.name(index), *self._choices[index]) for index in sorted(self._choices)]

    def name(self, index: int) -> str:
        return ".".join(self._names.get(index, ())) or f"number {index}"

    def note_layer(self, index: int, layer: str) -> None:
        if (index, layer) in self._layers:
            return
        self._layers.add((index, layer))
        parts = layer.split(".")
        pairs = zip(parts, self._names.get(index, parts), strict=False)
        self._names[index] = [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def hold(self, index: int, why: str) -> None:
        self._choices[index] = (IS_HELD, why)

    def hold_shared(self, index: int, why: str) -> None:
        """Hold the block in all later passes."""
        self._shared[index] = why
        self.hold(index, why)

    def sum_at_once(self, index: int) -> bool:
        """Sum the block in backward, unless its parameters, or their groups, are elsewhere, too."""
        if index in self._shared or index in self._across:
            return False
        self._choices[index] = (IS_SUMMED, "its factors need no other layer: the clipping rule has groups inside it")
        return True

    def recompute_across(self, index: int) -> None:
        """Note that groups of the clipping rule have layers of this block and others: it is not summed from now on."""
        self._across.add(index)
        self._choices[index] = (IS_RECOMPUTED, "a group of the clipping rule has other layers, too")

    def begin_micro_batch(self) -> None:
        self._reached.clear()
        self._reserve(self._costs)

    def is_held(self, index: int, samples: int, shape: Any, calls: int) -> bool:
        """Decide on a block that backward reaches. `calls`: how many blocks the forward pass had.

        shape: everything that has to be equal for a block to need the same memory per sample
        """
        self._reached.add(index)
        later = {i: cost.of(samples) for i, cost in self._costs.items() if i < calls and i not in self._reached}
        self._reserve(later)
        held, why = self._choose(index, samples, shape)
        self._choices[index] = (IS_HELD if held else IS_RECOMPUTED, why)
        return held

    def _choose(self, index: int, samples: int, shape: Any) -> tuple[bool, str]:
        if index in self._shared or samples < 2:
            return True, self._shared.get(index, "one sample: its gradients are the gradient")
        known = self._costs.get(index)
        if known is None or known.shape != shape:
            return False, "the first time, to see what it takes"
        cost = known.of(samples)
        if cost.held <= cost.boundary:
            return True, f"its layers hold {cost.held} bytes, its input and output gradients are {cost.boundary}"
        # Is there room?
        budget, saved = self._budget, f"{cost.boundary} bytes are held, not {cost.held}"
        limit = budget.ceiling(cost.activations, cost.sums)
        now = budget.allocated()
        if limit is None or now is None:
            return False, saved
        whose = "the peak of ordinary training" if budget.limit == LEAN else "the memory budget"
        needed = now.current + cost.held - cost.freed - cost.grads + self._leanest_to_come
        if needed <= limit:
            return True, f"it fits {whose}: about {needed} of {limit:.0f} bytes"
        leanest = now.current + max(cost.at_work, self._leanest_to_come)
        if leanest > limit:
            saved += f"; the leanest step takes about {leanest} bytes, {whose} is {limit:.0f}"
        return False, saved

    def _reserve(self, later: Mapping[int, BlockCost]) -> None:
        """Find the memory that blocks not yet reached by backward will add: the least, and if all are held.

        Held blocks come before kept gradients, because holding a block saves more time for its bytes.
        """
        at_work = max((each.at_work for each in later.values()), default=0)
        if_held = {i: each.held - each.freed for i, each in later.items()}
        self._leanest_to_come = at_work + sum(if_held[i] if i in self._shared else later[i].grads for i in later)
        self._budget.reserved = at_work + sum(max(if_held[i], later[i].grads) for i in later)

    # -- what a block takes ------------------------------------------------------------------------------------------

    def keeps(self, index: int, samples: int) -> bool:
        """Return True if layers of a held block may keep per-sample gradients: these take less, or there is room."""
        known = self._costs.get(index)
        if known is None or samples < 2:
            return True
        cost = known.of(samples)
        return cost.kept <= cost.held or self._budget.fits(cost.kept - cost.held)

    def knows(self, index: int, samples: int, shape: Any) -> bool:
        """Return True if exactly that many samples of that shape were recomputed before."""
        known = self._costs.get(index)
        return known is not None and (known.samples, known.shape) == (samples, shape)

    def note_cost(self, each: BlockPass, samples: int, shape: Any) -> None:
        """Record the cost of a pass whose norms are about to be taken."""
        parts = [part for parts in each.gathered.values() for part in parts]
        of_all = {id(part): part.saved or (part.materialise(),) for part in parts}
        saved = bytes_of(tensor for part in parts for tensor in of_all[id(part)])
        # Each layer keeps x and g, or per-sample gradients if those take no more.
        if_held = {id(p): p.decision.kept_if_held for p in parts if p.decision and p.decision.kept_if_held is not None}
        others = bytes_of(tensor for part in parts if id(part) not in if_held for tensor in of_all[id(part)])
        kept = int(sum(if_held.values())) + others
        grads = bytes_of(grad for grad in each.grads if grad is not None)
        leaves = () if each.input is None else each.input.leaves
        self._costs[each.index] = BlockCost(
            shape,
            samples,
            held=min(kept, saved),
            kept=kept,
            inputs=bytes_of(leaf for leaf in leaves if isinstance(leaf, Tensor)),
            freed=0 if each.input is None else each.input.own_bytes,
            grads=grads,
            activations=each.activations,
            gradients=bytes_of(map(gradient_of, parts)),
            sums=sum(4 * slot.parameter.numel() for slot in each.gathered),
        )

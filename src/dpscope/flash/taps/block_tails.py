"""The last product of a block that runs again, skipped if backward does not read its result.

Most blocks end in a product that is added to the residual stream. Its result is an output of the block, which is not
needed when the block runs again, and the backward pass of a sum reads no values: zeros do as well. In a transformer
that is a third of the products of the block's forward. A checkpoint's own second run stops there, too.

The product is skipped only if

- every operation after it, on the way to the block's outputs, is one whose backward reads no values; that is found in
  autograd's graph of a whole run, the first with samples of a shape;
- no layer runs after it: x of every layer is then what it was. This is checked in each run, and inputs and gradients
  of all layers are compared with those of the backward pass (recomputation.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Names of autograd's nodes that save no values of their operands. Dropout saves its mask.
_READ_NO_VALUES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Add", "Sub", "Neg", "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Clone", "ToCopy"),
        *("Unsqueeze", "Squeeze", "Slice", "Select", "Expand", "NativeDropout"),
    )
)


class Tail:
    """Last product of one run of a block. `left_out`: the number of the product to leave out, from 1; None: none."""

    def __init__(self, left_out: int | None) -> None:
        self.left_out = left_out
        self.products = 0
        self.is_last_layer = True  # no layer has run after the last product
        self.reads_no_values = False
        self._sequence = -1  # of the last product among autograd's nodes

    def leaves_out(self, node: Any) -> bool:
        """Return True if the next product is left out. `node`: the autograd node of its layer."""
        self.products += 1
        self._sequence = node._sequence_nr()
        return self.products == self.left_out

    def note_outputs(self, outputs: Iterable[Tensor]) -> None:
        """Note that the block has run forward."""
        if self.left_out is None and self.products:
            self.reads_no_values = _read_no_values(outputs, self._sequence)

    def note_layer(self) -> None:
        """Note that a layer's backward runs."""
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() > self._sequence:
            self.is_last_layer = False

    @property
    def can_be_left_out(self) -> int | None:
        """The number of the product that can be left out in the next run, after a run that made all of them."""
        return self.products if self.is_last_layer and self.reads_no_values else None

    @property
    def is_as_expected(self) -> bool:
        return self.left_out is None or (self.is_last_layer and self.products == self.left_out)


def _read_no_values(outputs: Iterable[Tensor], sequence: int) -> bool:
    """Return True if backward reads no values in any node that leads to the outputs and is younger than `sequence`."""
    nodes, seen = [output.grad_fn for output in outputs], set()
    while nodes:
        node = nodes.pop()
        # Parameters' own nodes have the largest number there is.
        if node is None or node in seen or "AccumulateGrad" in node.name() or node._sequence_nr() <= sequence:
            continue
        if node.name() not in _READ_NO_VALUES:
            return False
        seen.add(node)
        nodes += [after for after, _ in node.next_functions]
    return True

"""Graphs that a forward leaves behind: tensors with a history that it keeps somewhere, to be trained on later."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.torch_side.autograd_graph import saved_tensors_packed


class _Mark:
    """Something that a graph holds, and that is gone when the graph is."""


class LeftGraphs:
    """Context of a forward pass. What autograd saves in it is marked, and so is the graph of its outputs."""

    def __init__(self) -> None:
        self._mark: _Mark | None = _Mark()
        self._alive = weakref.ref(self._mark)
        self._packed = saved_tensors_packed(lambda tensor: (tensor.detach(), self._mark), lambda saved: saved[0])

    def __enter__(self) -> LeftGraphs:
        self._first = _sequence_number()
        self._packed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._packed.__exit__(*error)
        self._last = _sequence_number()

    def mark(self, nodes: list[Any]) -> None:
        """Mark the nodes of the outputs' graph; no more is to come."""
        for node in nodes:
            if type(node).__name__ != "AccumulateGrad":  # which lives with its parameter
                node.metadata[_Mark] = self._mark
        self._mark = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the pass that are still there, once its outputs are gone."""
        if self._alive() is None:
            return []
        gc.collect()  # a graph may be in a cycle with what has made it
        if self._alive() is None:
            return []
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.grad_fn is not None]
        return [each for each in tensors if self._first < each.grad_fn._sequence_nr() < self._last]


def _sequence_number() -> int:
    """Return the number of a node that is made now: nodes are numbered in order."""
    with torch.enable_grad():
        node = torch.ones((), requires_grad=True).neg().grad_fn
    assert node is not None
    return int(node._sequence_nr())

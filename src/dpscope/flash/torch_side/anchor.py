"""The anchor: a leaf of autograd's graph that stands for all parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Anchor:
    """Leaf `tensor` that is an input of every tapped call. A backward that records calls `begin_backward` first."""

    tensor: Tensor

    def __init__(self, begin_backward: Callable[[], None]) -> None:
        self._begin_backward = begin_backward
        self._recording = False
        self._set(_leaf())

    def _set(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._node = torch.autograd.graph.get_gradient_edge(tensor).node
        self._graph_task = -1

    @contextmanager
    def renewed(self) -> Iterator[Tensor]:
        """Replace the tensor inside the block by a new one, which no earlier graph leads to."""
        before = self.tensor
        self._set(_leaf())
        try:
            yield self.tensor
        finally:
            self._set(before)

    def is_recording(self) -> bool:
        """Return True if the running backward pass accumulates the gradients of parameters.

        `torch.autograd.grad(loss, x)` and `backward(inputs=[x])` do not: autograd then skips the anchor.
        """
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._recording = torch._C._will_engine_execute_node(self._node)
            self._graph_task = task
            if self._recording:
                self._begin_backward()
        return self._recording


def _leaf() -> Tensor:
    return torch.zeros((), requires_grad=True, device="cpu")

"""Modules of operators, in the forward pass and in the backward pass, without touching the graph.

Autograd numbers the nodes of its graph as they are made. Hooks around every module's forward note the number at which
the module begins and ends, so the module of a node that runs in a backward pass is found by its number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpscope.instruments.module_hooks import module_hooks


class ModulePaths:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []  # the forwards that are running, outermost first
        self._numbers: list[int] = []  # autograd's number, and
        self._modules: list[str] = []  # the module whose forward runs from there on

    @contextmanager
    def watching(self) -> Iterator[None]:
        # Always: checkpointing leaves forwards by an exception on purpose.
        with module_hooks(self._model, before=self._enter, after=self._leave, always=True):
            yield

    def current(self) -> str:
        """Return the module that the calling thread's operator works for; empty if none."""
        if self._running:
            return self._running[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[place] if place >= 0 else ""

    def _enter(self, path: str) -> None:
        self._running.append(path)
        self._note()

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        if not in_backward():  # a forward that runs again does not make the nodes that will run
            self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._modules.append(self._running[-1] if self._running else "")


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)

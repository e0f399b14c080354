"""How the tests of compiled models compile, and what they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import Losses, assert_agrees, reference

Compile = Callable[..., nn.Module]


class Graphs(CompileCounterWithBackend):
    """A backend that traces forward and backward as Inductor would, runs them by torch, and counts graphs."""

    def __init__(self, backend: str = "aot_eager") -> None:
        super().__init__(backend)

    @property
    def count(self) -> int:
        return int(self.frame_count)


def by_wrapper(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def assert_compiled_exact(
    model: nn.Module,
    batch: Any,
    losses: Losses,
    *,
    compile: Compile = by_wrapper,
    after: bool = False,
    steps: int = 2,
    backend: str = "aot_eager",
    **options: Any,
) -> Graphs:
    """Private steps of the model, compiled before or after it was made private, give the oracle's norms and sums."""
    truth, c = reference(model, batch, losses)
    model.zero_grad()
    graphs = Graphs(backend)
    called = model if after else compile(model, backend=graphs, **options)
    with FlashEngine(called, max_grad_norm=c) as engine:
        called = compile(model, backend=graphs, **options) if after else called
        for _ in range(steps):
            engine.zero_grad()
            losses(called, batch).mean().backward()
            engine.finish()
        assert_agrees(model, batch, losses, engine, truth, c)
    return graphs

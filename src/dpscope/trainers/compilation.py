"""torch.compile around the model of a trainer, and what it has compiled so far in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.vocabulary.settings import EAGER


def compile_model(model: nn.Module, mode: str) -> nn.Module:
    """The model as `torch.compile` runs it; it is compiled when it is first called."""
    if mode == EAGER:
        return model
    try:
        compiled: Any = torch.compile(model, mode=None if mode == "default" else mode)
    except RuntimeError as error:  # on a Python that this torch cannot compile for
        raise UserError(f"torch {torch.__version__} cannot compile here ({error}): leave out --compile") from None
    return compiled  # type: ignore[no-any-return]


def eager_calls() -> AbstractContextManager[object]:
    """Compiled models run eager in here, for what looks at operators: a graph has none."""
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return context


@dataclass(frozen=True)
class CompileCounts:
    """Graphs that torch.compile has made, and places where it could not go on with one."""

    graphs: int
    breaks: int

    @classmethod
    def now(cls) -> CompileCounts:
        from torch._dynamo.utils import counters

        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))

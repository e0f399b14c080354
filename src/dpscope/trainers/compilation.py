"""torch.compile around the model of a trainer, and what it has compiled so far in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpscope.errors import MeasurementFailed, UserError
from dpscope.packages import install_command

# What torch calls them, and what it did up to 2.6.
RECOMPILE_LIMITS = ("recompile_limit", "accumulated_recompile_limit")
CACHE_SIZE_LIMITS = ("cache_size_limit", "accumulated_cache_size_limit")


def compile_model(model: nn.Module, mode: str) -> nn.Module:
    """Return the model as `torch.compile` runs it; it is compiled when it is first called."""
    if trouble := compile_obstacle(next(model.parameters()).device.type):
        raise MeasurementFailed(f"{trouble}, or leave out --compile")
    try:
        compiled: Any = torch.compile(model, mode=None if mode == "default" else mode)
    except RuntimeError as error:  # on a Python that this torch cannot compile for
        raise MeasurementFailed(f"{error}: use another Python, or leave out --compile") from None
    return compiled  # type: ignore[no-any-return]


def torch_folder() -> str:
    """Return the folder where torch is installed."""
    return str(torch.__path__[0])


def compile_obstacle(device: str) -> str | None:
    """Return why torch.compile cannot work for a device of this machine, and how to fix it; None if it may work."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        if has_triton():
            return None
        return f"torch.compile needs Triton and a GPU of compute capability 7 or newer: {install_command('triton')}"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # of a class that differs between versions of torch
        return "torch.compile finds no C++ compiler: install g++, or set CXX to one that works"
    if " " in torch_folder():  # Inductor hands paths to the linker without quotes
        return "torch.compile cannot link from a path with a space: make the environment in a folder without one"
    return None


@contextmanager
def must_compile() -> Iterator[None]:
    """Raise `UserError` if nothing is compiled inside the context. Earlier graphs of this process are dropped."""
    torch._dynamo.reset()
    before = CompileCounts.now()
    yield
    after = CompileCounts.now()
    if after.graphs > before.graphs:
        return
    if after.breaks > before.breaks:
        raise UserError(
            "torch.compile compiled nothing: it can trace no part of the model. See TORCH_LOGS=graph_breaks and "
            "docs/compiled.md, or leave out --compile"
        )
    raise UserError(
        "torch.compile compiled nothing: the loss never calls the model itself, or TORCHDYNAMO_DISABLE is set. Write "
        "model(inputs) in the loss function, or leave out --compile"
    )


def any_number_of_graphs() -> AbstractContextManager[object]:
    """Let torch.compile make a graph for every shape. By default it gives up after a few, and only logs it."""
    from torch._dynamo import config

    names = RECOMPILE_LIMITS if hasattr(config, RECOMPILE_LIMITS[0]) else CACHE_SIZE_LIMITS
    context: AbstractContextManager[object] = config.patch(dict.fromkeys(names, 10**5))
    return context


def eager_calls() -> AbstractContextManager[object]:
    """Run compiled models eagerly, for instruments that observe operators, which a graph does not have."""
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return context


@dataclass(frozen=True)
class CompileCounts:
    """Number of graphs that torch.compile has made, and of graph breaks."""

    graphs: int
    breaks: int

    @classmethod
    def now(cls) -> CompileCounts:
        from torch._dynamo.utils import counters

        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))

"""Activation checkpointing: what a block's forward computes is not kept, and backward runs that forward again.

A model of Hugging Face knows its blocks. In any other model they are modules of one class that repeat in an
`nn.ModuleList` or `nn.Sequential` and have modules of their own: transformer layers, residual blocks.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError


class Checkpoints:
    """Count of blocks that ran under a checkpoint; torch calls it, as `context_fn`, for each of them."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        self.runs += 1
        return nullcontext(), nullcontext()

    def require_runs(self) -> None:
        """Raise `UserError` if blocks were found, but a forward pass bypassed their checkpoints."""
        if not self.runs:
            raise UserError(
                "the model's blocks ran without checkpoints: call model.train() for a Hugging Face model, call blocks "
                "as modules (block(x)) in any other, or leave out --checkpoint-blocks"
            )


class Checkpointed(nn.Module):
    """A block whose calls, its hooks among them, run under `torch.utils.checkpoint`."""

    checkpoints: Checkpoints | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        options = _options(self.checkpoints)
        return checkpoint(super().__call__, *args, **options, **kwargs)


def _options(checkpoints: Checkpoints | None) -> dict[str, Any]:
    """Return options of torch's checkpoint. torch.compile takes no `context_fn` but a function of its own."""
    return {"use_reentrant": False, **({} if checkpoints is None else {"context_fn": checkpoints})}


def checkpoint_blocks(model: nn.Module, *, compiled: bool = False) -> Checkpoints | None:
    """Checkpoint every block of the model; raise `UserError` if there is none.

    Runs of a model that will be `compiled` are not counted.
    """
    checkpoints = None if compiled else Checkpoints()
    if not _checkpoint_in(model, checkpoints):
        raise UserError(
            "the model has no blocks to checkpoint: no nn.ModuleList or nn.Sequential repeats a module with layers. "
            "Put repeated layers into such modules, or leave out --checkpoint-blocks"
        )
    return checkpoints


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost blocks in a module."""
    found = _blocks_of(module)
    return [*found, *(block for child in module.children() if child not in found for block in find_blocks(child))]


def _checkpoint_in(module: nn.Module, checkpoints: Checkpoints | None) -> int:
    """Checkpoint the outermost blocks in a module; return how many there are."""
    if _enable_in_transformers(module, checkpoints):
        return 1
    blocks = _blocks_of(module)
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _checkpointed(kind)
        vars(block)["checkpoints"] = checkpoints
    rest = (child for child in module.children() if child not in blocks)
    return len(blocks) + sum(_checkpoint_in(child, checkpoints) for child in rest)


def _enable_in_transformers(module: nn.Module, checkpoints: Checkpoints | None) -> bool:
    """Make a model of Hugging Face, which may be wrapped, checkpoint its own blocks. Return whether it can."""
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        return False
    try:
        enable(gradient_checkpointing_kwargs=_options(checkpoints))
    except (ValueError, TypeError):  # an architecture without; a method of that name that is another
        return False
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a container that are blocks: called, made of layers, not the only one of their class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = [child for child in module.children() if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
    counts = Counter(map(type, children))
    alone = len(children) == 1 and isinstance(module, nn.ModuleList)  # a model of one layer
    return [child for child in children if (counts[type(child)] > 1 or alone) and any(child.children())]


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class with checkpointed calls: a class and not a wrapper, so that names and copies stay."""
    if issubclass(kind, Checkpointed):
        return kind
    return type(kind.__name__, (Checkpointed, kind), {"__module__": kind.__module__})

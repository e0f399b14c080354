"""An empty draw, or a rank's empty share, also runs the model: FSDP2's collectives need every rank.

Many models cannot take a batch of none (`x.view(len(x), -1, heads)` of no elements is ambiguous). So one sample of
zeros is made up. Its output is cut to no rows, and its gradients are dropped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpscope.flash.torch_side.arguments import Leaf, leaves_in, replace_leaves

ModelCall = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs


def make_up_sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall | None:
    """Return the call with one sample of zeros if it has no samples; None if no tensor in it could hold one."""
    if not any(_is_empty(leaf) for leaf in leaves_in((args, kwargs))):
        return None
    call: ModelCall = replace_leaves((args, kwargs), _with_one_row)
    return call


def without_rows(output: Any) -> Any:
    """Remove the made-up sample from the model's output."""
    return replace_leaves(output, _without_row)


def _is_empty(leaf: Leaf) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape[0] == 0


def _without_row(leaf: Leaf) -> Leaf:
    # A copy: FSDP2's hooks do not hold on views.
    return leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.shape[0] == 1 else leaf


def _with_one_row(leaf: Leaf) -> Leaf:
    return leaf.new_zeros((1, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.shape[0] == 0 else leaf

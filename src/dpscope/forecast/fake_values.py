"""Values of fake tensors which code may read: ids and masks of a batch, counters, short lists of the CPU.

A value is an attribute of its fake tensor. Whole numbers and scalars that are made of known ones are computed on the
CPU, and so are a few real numbers of the CPU itself: models make lists of drop-path rates by torch.linspace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from dpscope.errors import UserError

LARGEST_VALUE = 2**22  # elements of whole numbers whose values are followed
LARGEST_LIST = 256  # elements of real numbers on the CPU
LARGEST_MADE = 2**18  # elements of such that are made of less: tables of positions, causal masks
_VALUE = "known_value"
_READ, _COMPARE = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default
_UNKNOWN = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default}


class ReadsValues(UserError):
    """The model reads the value of a tensor that has none."""


def know(tensor: Tensor, value: Tensor) -> None:
    """Note what a fake tensor holds."""
    setattr(tensor, _VALUE, value)


def forget(tensor: Tensor) -> None:
    """Take the value of a fake tensor for unknown, and with it all that is made of it."""
    vars(tensor).pop(_VALUE, None)


def reads_values(func: Any) -> bool:
    """Return whether an operator's result is a value."""
    return func is _READ or func is _COMPARE


def read(func: Any, args: Any) -> Any:
    """Return the result of an operator that reads values, or raise `ReadsValues` if they are not known."""
    known = _known_arguments(func, args, {})
    if known is None and func is _COMPARE:
        raise ReadsValues("the model compares tensors of which a plan knows the shapes alone")
    if known is None:
        raise ReadsValues(
            "the model reads the value of a tensor (.item(), a comparison in an if), and a plan knows shapes alone: "
            "measure it on a GPU (dpscope compare)"
        )
    with _disable_current_modes():
        return func(*known[0])


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compute the value of an operator's result, if those of its arguments are known, and the result is small."""
    if type(result) is FakeTensor and not _may_be_read(result):
        return  # most of them
    known = _known_arguments(func, args, kwargs)
    if known is None or not _is_followed(result, known):
        return
    with _disable_current_modes():
        try:
            value = func(*known[0], **known[1])
        except (RuntimeError, NotImplementedError, TypeError):
            return
    for fake, each in zip(_tensors(result), _tensors(value), strict=True):
        know(fake, each)


def shaped_by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator such as unique, whose shape depends on values, if the values are known."""
    known = _known_arguments(func, args, kwargs)
    if known is None:
        raise ReadsValues(f"{func._schema.name} gives a tensor whose shape depends on values that a plan does not know")
    with _disable_current_modes():
        value = func(*known[0], **known[1])
    device = _tensors((args, kwargs))[0].device
    results = tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), value)
    for fake, each in zip(tree_leaves(results), tree_leaves(value), strict=True):
        know(fake, each)
    return results


def _known_arguments(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Return the arguments with values in the place of fake tensors; None if one has no value."""
    for each in args:
        if type(each) is FakeTensor and _VALUE not in each.__dict__:
            return None
    if func in _UNKNOWN:
        return None
    flat, spec = tree_flatten((args, kwargs))
    values = []
    for leaf in flat:
        value = leaf.__dict__.get(_VALUE) if isinstance(leaf, FakeTensor) else leaf
        if value is None and leaf is not None:
            return None
        values.append(torch.device("cpu") if isinstance(leaf, torch.device) else value)
    found: tuple[Any, Any] = tree_unflatten(values, spec)
    return found


def _is_followed(result: Any, known: tuple[Any, Any]) -> bool:
    """Return whether all results of an operator are small enough, and may be read."""
    made = _tensors(result)
    most = min(LARGEST_VALUE, max(LARGEST_MADE, 4 * sum(each.numel() for each in _tensors(known))))
    return bool(made) and all(each.numel() <= most and _may_be_read(each) for each in made)


def _may_be_read(tensor: Tensor) -> bool:
    """Return whether code may read a tensor like this: a scalar, whole numbers, or a short list of the CPU."""
    if not tensor.dim() or not tensor.is_floating_point():
        return True
    return tensor.device.type == "cpu" and tensor.numel() <= LARGEST_LIST


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

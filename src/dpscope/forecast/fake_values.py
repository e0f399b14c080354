"""Values of fake tensors which code may read: ids and masks of a batch, counters, and what is made of them.

A value is an attribute of its fake tensor: a real tensor on the CPU. What an operator makes of known values is computed
there, if it is small. Views of a value share its memory, as their fake tensors do. What is written over with unknown
values is unknown from then on. Choices among unknown scores are taken to be even: a mixture sends as many rows to each
expert.
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
LARGEST_MADE = 2**18  # elements of real numbers, and of what is made of less: tables of positions, causal masks
_VALUE = "known_value"
_CHOOSES = {torch.ops.aten.topk.default: 1, torch.ops.aten.argmax.default: 0}  # which result holds the choices
_INDEX, _SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_UNKNOWN = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default}


class ReadsValues(UserError):
    """The model reads the value of a tensor that has none."""


def know(tensor: Tensor, value: Tensor) -> None:
    """Note what a fake tensor holds."""
    setattr(tensor, _VALUE, value)


def forget(tensor: Tensor) -> None:
    """Take the value of a fake tensor for unknown, and with it that of its views and all that is made of it later."""
    value = vars(tensor).pop(_VALUE, None)
    if value is not None and value.untyped_storage().resizable():
        value.untyped_storage().resize_(0)  # which its views share


def _value_of(tensor: FakeTensor) -> Tensor | None:
    value: Tensor | None = tensor.__dict__.get(_VALUE)
    if value is None or (value.numel() and not value.untyped_storage().nbytes()):
        return None
    return value


def read(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator that reads values, or raise `ReadsValues` if they are not known."""
    known = _known_arguments(func, args, kwargs)
    if known is None:
        reads = "compares tensors" if len(_tensors(args)) > 1 else "reads the value of a tensor"
        raise ReadsValues(
            f"the model {reads} (.item(), a comparison in an if), and a plan knows shapes alone: measure it on a GPU "
            "(dpscope compare)"
        )
    with _disable_current_modes():
        return func(*known[0], **known[1])


def choose(func: Any, args: Any, result: Any) -> bool:
    """Note even choices as the result of an operator that chooses among unknown scores; return whether it is one."""
    if func not in _CHOOSES or _value_of(args[0]) is not None or not args[0].dim():
        return False
    chosen = _tensors(result)[_CHOOSES[func]]
    with _disable_current_modes():
        value = torch.arange(chosen.numel()).remainder_(max(args[0].shape[-1], 1))
        # But for the first, so that counts are no multiples of the batch, as they would be by chance alone.
        first = value[: chosen.shape[-1] if func is torch.ops.aten.topk.default else 1]
        first.copy_(args[0].shape[-1] - 1 - first)
        know(chosen, value.view(chosen.shape))
    return True


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compute the value of an operator's result, if those of its arguments are known, and the result is small."""
    writes = func._schema.is_mutable
    if type(result) is FakeTensor and not writes and not _may_be_read(result):
        return  # most of them
    known = _known_arguments(func, args, kwargs)
    if known is not None and _is_followed(func, result, known):
        with _disable_current_modes():
            try:
                value = func(*known[0], **known[1])
            except (RuntimeError, NotImplementedError, TypeError):
                value = None
        if value is not None:
            for fake, each in zip(_tensors(result), _tensors(value), strict=True):
                know(fake, each)
            return
    if writes:
        for argument, given in zip(func._schema.arguments, (*args, *kwargs.values()), strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given):
                    forget(tensor)


def shaped_by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator such as unique, whose shape depends on values, if the values are known."""
    if func is _SELECT:
        x, mask = args
        shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
        return x.expand(shape)[mask.expand(shape)]
    if func is _INDEX and any(map(_is_known_mask, args[1])):  # as CUDA does it: masks become places
        places = [index.nonzero().unbind(1) if _is_known_mask(index) else (index,) for index in args[1]]
        return func(args[0], [each for several in places for each in several])
    known = _known_arguments(func, args, kwargs)
    if known is None:
        raise ReadsValues(
            f"{func._schema.name} gives a tensor whose shape depends on values that a plan does not know: measure the "
            "model on a GPU (dpscope compare)"
        )
    with _disable_current_modes():
        value = func(*known[0], **known[1])
    device = _tensors((args, kwargs))[0].device
    results = tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), value)
    for fake, each in zip(tree_leaves(results), tree_leaves(value), strict=True):
        know(fake, each)
    return results


def _is_known_mask(index: FakeTensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8) and _value_of(index) is not None


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
        value = _value_of(leaf) if isinstance(leaf, FakeTensor) else leaf
        if value is None and leaf is not None:
            return None
        values.append(torch.device("cpu") if isinstance(leaf, torch.device) else value)
    found: tuple[Any, Any] = tree_unflatten(values, spec)
    return found


def _is_followed(func: Any, result: Any, known: tuple[Any, Any]) -> bool:
    """Return whether all results of an operator are small enough, and none is a table of random numbers."""
    made = _tensors(result)
    most = min(LARGEST_VALUE, max(LARGEST_MADE, 4 * sum(each.numel() for each in _tensors(known))))
    draws = torch.Tag.nondeterministic_seeded in func.tags and any(each.dim() for each in made)
    return bool(made) and not draws and all(each.numel() <= most and _may_be_read(each) for each in made)


def _may_be_read(tensor: Tensor) -> bool:
    """Return whether code may read a tensor like this: whole numbers, or a few real ones."""
    return not tensor.is_floating_point() or tensor.numel() <= LARGEST_MADE


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

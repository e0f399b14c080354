"""Arguments of a call: the tensors in it, wherever they are, and the same call with other rows of the batch.

Lists, tuples, dictionaries and what behaves like them, dataclasses, and any other object's attributes are opened;
modules, functions and classes are not. A PackedSequence is one thing: its samples are not rows of a tensor.

An empty draw, or a rank's empty share, also runs the model: FSDP2's collectives need every rank. Many models cannot
take a batch of none (`x.view(len(x), -1, heads)` of no elements is ambiguous). So one sample of zeros is made up
(`make_up_sample`). Its output is cut to no rows, and its gradients are dropped.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

# Any of their values may choose the way through a forward. (numpy's numbers are Numbers, too.)
_TELLING = (type(None), Number, str, bytes, range, slice, torch.device, torch.dtype)
_PLAIN = (*_TELLING, torch.Generator, torch.Size)
_CLOSED = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)

SAMPLE_COUNT = "number", "of samples"
"""In a signature: a number as large as that of the samples."""

Leaf = Tensor | PackedSequence
ArgumentPlace = tuple[Any, ...]  # of an argument: keys that lead to it
ModelCall = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs

KEEP_BATCH_FIRST = (
    "flash clipping needs the batch as the first dimension of every layer's input; "
    "keep it first and do not flatten it into others (a leading dimension of 1 is broadcast)"
)


NEEDS_DENSE = (
    "and per-sample gradients are made of dense ones; call .to_dense() on it (to_padded_tensor() if it is nested) "
    "before that, or freeze the weight"
)


def leaves_in(value: Any) -> list[Leaf]:
    """Return tensors with at least one dimension, and packed sequences, in the order in which they are met."""
    found = (leaf for leaf in _walk(value, set()) if isinstance(leaf, Leaf))
    return [leaf for leaf in found if isinstance(leaf, PackedSequence) or leaf.dim()]


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors, including those without a dimension."""
    return [leaf for leaf in _walk(value, set()) if isinstance(leaf, Tensor)]


def signature(value: Any, samples: int | None = None) -> tuple[Hashable, ...]:
    """Return a key that is equal for calls that take the same way through a forward.

    It has types, dimensions, numbers other than that of `samples`, options, and which tensors require a gradient, but
    no sizes of tensors.
    """
    return tuple(
        SAMPLE_COUNT if samples is not None and number_of(leaf) == samples else _describe(leaf)
        for leaf in _walk(value, set())
    )


def numbers_in(
    value: Any, place: ArgumentPlace = (), opened: frozenset[int] = frozenset()
) -> Iterator[tuple[ArgumentPlace, Any]]:
    """Yield the place and the value of every number in the arguments, those in a `torch.Size` too."""
    number = number_of(value)
    if number is not None:
        yield place, number
    elif isinstance(value, torch.Size) or not isinstance(value, (Tensor, PackedSequence, *_PLAIN, *_CLOSED)):
        for key, child in [] if id(value) in opened else _children(value):
            yield from numbers_in(child, (*place, key), opened | {id(value)})


def renumbered(leaf: Any, number: int) -> Any:
    """Return another number for one, or a tensor for a tensor without a dimension."""
    return torch.full_like(leaf, number) if isinstance(leaf, Tensor) else type(leaf)(number)


def number_of(leaf: Any) -> Any:
    """Return the number that an argument is, also as a tensor without a dimension; None if it is something else."""
    if isinstance(leaf, Number):
        return None if isinstance(leaf, bool) else leaf
    is_number = type(leaf) is Tensor and not leaf.dim() and leaf.device.type == "cpu" and leaf.dtype != torch.bool
    return leaf.item() if is_number and not leaf.requires_grad else None


def sizes_of(value: Any) -> Hashable:
    """Return a key like `signature` that also has the sizes and dtypes of tensors."""
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _describe(leaf) for leaf in _walk(value, set())
    )


def rows_of(leaf: Leaf) -> int:
    return int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else leaf.shape[0]


def take(leaf: Leaf, index: Tensor, dim: int) -> Leaf:
    """Return the rows `index` of a leaf, along the dimension of samples."""
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        lengths = lengths[index.to(lengths.device)]
        return pack_padded_sequence(padded[index.to(padded.device)], lengths, batch_first=True, enforce_sorted=False)
    return leaf.index_select(dim, index.to(leaf.device))


def replace_leaves(
    value: Any,
    change: Callable[[Leaf], Leaf],
    copies: dict[int, Any] | None = None,
    *,
    scalars: bool = False,
    numbers: Mapping[ArgumentPlace, int] = {},
    place: ArgumentPlace = (),
) -> Any:
    """Copy `value` with every leaf changed, tensors without a dimension if `scalars`, and the `numbers` at some places.

    Containers are copied, too, which protects the caller's from writes.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and (scalars or value.dim())):
        copies[id(value)] = changed = change(value)
        return changed
    if place in numbers or isinstance(value, Tensor):
        return renumbered(value, numbers[place]) if place in numbers else value.clone()
    is_closed = isinstance(value, (*_PLAIN, *_CLOSED)) and not isinstance(value, torch.Size)
    if is_closed or not (children := _children(value)):
        return value

    def replace(key: Any, child: Any) -> Any:
        return replace_leaves(child, change, copies, scalars=scalars, numbers=numbers, place=(*place, key))

    if isinstance(value, (tuple, set, frozenset)):
        items = [replace(key, child) for key, child in children]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    copies[id(value)] = clone = copy.copy(value)
    for key, child in children:
        new = replace(key, child)
        if isinstance(value, (list, Mapping)):
            clone[key] = new
        else:
            object.__setattr__(clone, key, new)  # a frozen dataclass is copied, too
    return clone


def make_up_sample(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: Collection[ArgumentPlace] = ()
) -> ModelCall | None:
    """Return the call with one sample of zeros if it has no samples; None if no tensor in it could hold one.

    The numbers at `told` are that of the samples.
    """
    empty = {id(leaf) for leaf in leaves_in((args, kwargs)) if isinstance(leaf, Tensor) and leaf.shape[0] == 0}

    def with_row(leaf: Leaf) -> Leaf:
        return leaf.new_zeros((1, *leaf.shape[1:])) if isinstance(leaf, Tensor) and id(leaf) in empty else leaf

    return replace_leaves((args, kwargs), with_row, numbers=dict.fromkeys(told, 1)) if empty else None


def without_rows(output: Any) -> Any:
    """Remove the made-up sample from the model's output."""

    def without_row(leaf: Leaf) -> Leaf:
        # A copy: FSDP2's hooks do not hold on views.
        return leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.shape[0] == 1 else leaf

    return replace_leaves(output, without_row)


def _walk(value: Any, opened: set[int]) -> Iterator[Any]:
    if isinstance(value, (Tensor, PackedSequence, *_PLAIN, *_CLOSED)) or id(value) in opened:
        yield value
        return
    opened.add(id(value))
    yield type(value)
    for key, child in _children(value):
        if isinstance(key, str):
            yield key
        yield from _walk(child, opened)


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Return (key, child) pairs; none for a value that is not opened."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return [(name, getattr(value, name)) for name in slots if hasattr(value, name)]


def _describe(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.is_floating_point(), leaf.requires_grad
    # By repr, for NaN is not equal to itself, and 1 is equal to True and to 1.0.
    return (type(leaf), repr(leaf)) if isinstance(leaf, _TELLING) else (type(leaf),)

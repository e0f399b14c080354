"""Results of operators on fake tensors, cached by the shapes and types of their arguments.

A model makes a few hundred different calls, thousands of times. torch remembers them too, but describes each argument
in full, which takes most of a step on fake tensors. Here sizes, strides and dtypes decide. Calls that are unusual in
any way are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_META = torch.device("meta")
_make_subclass: Callable[..., Any] = Tensor._make_subclass  # torch's own, which the fake device replaces
_CHANGES_TENSORS = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}
# Operators of the noise generator for which another number makes no difference: it has a new one in each call.
_ANY_NUMBER = {f"aten::{name}" for name in ("bitwise_and", "bitwise_and_", "bitwise_xor", "bitwise_xor_", "full_like")}


class _Unusual(Exception):
    """A call that is not remembered."""


class _Look(NamedTuple):
    """Description of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Size of a storage that holds such a tensor and nothing else."""
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (1 + reach) * self.dtype.itemsize


class _Recipe(NamedTuple):
    """A result: `same` as an argument, a view of one (`argument`), a tensor of its own, or a plain value."""

    look: _Look | None = None
    argument: int | None = None
    same: bool = False
    value: Any = None


class RememberedResults:
    """Results of a mode's operators. Recipes hold no tensors, so that later modes use them, too."""

    # By key: the operator, which keeps its id alive, the kind of its results, their recipes; None if unusual.
    _recipes: ClassVar[dict[Any, tuple[Any, type, list[_Recipe]] | None]] = {}

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._states: dict[torch.device, dict[str, Any]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Return the result of a call: made anew if it is known, else computed."""
        key = key_of(func, args, kwargs)
        known = None if key is None else self._recipes.get(key)
        operands = (*args, *kwargs.values()) if kwargs else args
        if known is not None:
            _, kind, recipes = known
            if kind is list or kind is tuple:
                return kind([self._make(recipe, operands) for recipe in recipes])
            return self._make(recipes[0], operands)
        result = compute(args, kwargs)
        if key is not None and key not in self._recipes:
            kind = type(result)
            try:
                several = result if kind in (list, tuple) else [result]
                self._recipes[key] = func, kind, [_recipe(func, each, key, operands) for each in several]
            except _Unusual:
                self._recipes[key] = None
        return result

    def _make(self, recipe: _Recipe, operands: tuple[Any, ...]) -> Any:
        look, argument, same, value = recipe
        if look is None:
            return value
        if same and argument is not None:
            return operands[argument]
        dtype, shape, stride, offset, device = look
        empty = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        if argument is not None:
            empty.set_(operands[argument].untyped_storage(), offset, shape, stride)
        state = self._states.get(device)
        if state is None:  # of the first tensor on the device, as torch makes it
            state = self._states[device] = vars(FakeTensor(self._mode, empty, device)).copy()
        fake = _make_subclass(FakeTensor, empty, False, device_for_backend_keys=device)
        fake.__dict__.update(state)
        return fake


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache key of a call on fake tensors; None if the call is unusual."""
    try:
        parts = [_describe(value) for value in args]
        if kwargs:
            parts += (*map(_describe, kwargs.values()), tuple(kwargs))
    except _Unusual:
        return None
    if func._schema.name in _ANY_NUMBER:
        parts = [part[:1] if part[0] is int else part for part in parts]
    return id(func), torch.get_default_dtype(), *parts


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
            raise _Unusual
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device
    if kind in _PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        return kind, *map(_describe, value)
    raise _Unusual


def _recipe(func: Any, result: Any, key: Any, operands: tuple[Any, ...]) -> _Recipe:
    if func._schema.name in _CHANGES_TENSORS:
        raise _Unusual
    if type(result) in _PLAIN:
        return _Recipe(value=result)
    if not isinstance(result, FakeTensor) or result.requires_grad:
        raise _Unusual
    look = _Look(*_describe(result))
    storage = result.untyped_storage()
    for place, argument in enumerate(operands):
        if isinstance(argument, FakeTensor) and argument.untyped_storage()._cdata == storage._cdata:
            same = result is argument
            if same and look != key[2 + place]:
                raise _Unusual
            return _Recipe(look, place, same)
    if look.offset or storage.nbytes() != look.nbytes or _is_within(storage, operands):
        raise _Unusual
    return _Recipe(look)


def _is_within(storage: torch.UntypedStorage, operands: tuple[Any, ...]) -> bool:
    """Return whether a storage belongs to a tensor in a list of tensors."""
    several = (each for argument in operands if isinstance(argument, list | tuple) for each in argument)
    return any(isinstance(each, Tensor) and each.untyped_storage()._cdata == storage._cdata for each in several)

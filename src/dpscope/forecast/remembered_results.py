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
_CHANGES_TENSORS = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}


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

    _recipes: ClassVar[dict[Any, tuple[type, list[_Recipe]] | None]] = {}

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._states: dict[torch.device, dict[str, Any]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Return the result of a call: made anew if it is known, else computed."""
        key = key_of(func, args, kwargs)
        if key is None:
            return compute(args, kwargs)
        if (known := self._recipes.get(key)) is not None:
            kind, recipes = known
            made = [self._make(recipe, args) for recipe in recipes]
            return kind(made) if kind in (list, tuple) else made[0]
        result = compute(args, kwargs)
        if key not in self._recipes:
            kind = type(result)
            try:
                recipes = [_recipe(each, key, args) for each in (result if kind in (list, tuple) else [result])]
                self._recipes[key] = kind, recipes
            except _Unusual:
                self._recipes[key] = None
        return result

    def _make(self, recipe: _Recipe, args: tuple[Any, ...]) -> Any:
        look = recipe.look
        if look is None:
            return recipe.value
        if recipe.argument is not None and recipe.same:
            return args[recipe.argument]
        empty = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
        if recipe.argument is not None:
            storage: Any = args[recipe.argument].untyped_storage()
            empty.set_(storage, look.offset, look.shape, look.stride)
        if look.device not in self._states:  # of the first tensor on the device, as torch makes it
            self._states[look.device] = vars(FakeTensor(self._mode, empty, look.device)).copy()
        options: Any = {"device_for_backend_keys": look.device}
        fake: Tensor = Tensor._make_subclass(FakeTensor, empty, False, **options)
        vars(fake).update(self._states[look.device])
        return fake


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache key of a call on fake tensors; None if the call is unusual."""
    if func._schema.name in _CHANGES_TENSORS or any(isinstance(value, Tensor) for value in kwargs.values()):
        return None
    try:
        named = tuple((name, _describe(value)) for name, value in kwargs.items())
        return func, torch.get_default_dtype(), tuple(map(_describe, args)), named
    except _Unusual:
        return None


def _describe(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.layout != torch.strided or value.dtype.is_complex:
            raise _Unusual
        return _Look(value.dtype, value.shape, value.stride(), int(value.storage_offset()), value.fake_device)
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return (kind, *map(_describe, value))
    raise _Unusual


def _recipe(result: Any, key: Any, args: tuple[Any, ...]) -> _Recipe:
    if type(result) in _PLAIN:
        return _Recipe(value=result)
    look = _describe(result)
    if not isinstance(look, _Look) or result.requires_grad:
        raise _Unusual
    storage = result.untyped_storage()
    for place, argument in enumerate(args):
        if isinstance(argument, FakeTensor) and argument.untyped_storage()._cdata == storage._cdata:
            same = result is argument
            if same and look != key[2][place]:
                raise _Unusual
            return _Recipe(look, place, same)
    if look.offset or storage.nbytes() != look.nbytes or _is_within(storage, args):
        raise _Unusual
    return _Recipe(look)


def _is_within(storage: torch.UntypedStorage, args: tuple[Any, ...]) -> bool:
    """Return whether a storage belongs to a tensor in a list of tensors."""
    several = (each for argument in args if isinstance(argument, list | tuple) for each in argument)
    return any(isinstance(each, Tensor) and each.untyped_storage()._cdata == storage._cdata for each in several)

"""Results of operators on fake tensors, remembered by what their arguments look like.

A model makes a few hundred different calls, thousands of times. torch remembers them too, but describes each argument
in full, which takes most of a step on fake tensors. Here sizes, strides and dtypes decide. Calls that are unusual in
any way are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_CHANGES_TENSORS = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}


class _Unusual(Exception):
    """A call that is not remembered."""


class _Made(NamedTuple):
    """A tensor that an operator returns: an argument's, if `argument` is one, else of a storage of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    argument: int | None = None
    is_argument: bool = False


class RememberedResults:
    """Results of a mode's operators."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._states: dict[torch.device, dict[str, Any]] = {}
        self._known: dict[Any, tuple[type, list[Any]] | None] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Return the result of a call: made anew if it is known, else computed."""
        key = key_of(func, args, kwargs)
        entry = None if key is None else self._known.get(key)
        if entry is not None:
            kind, parts = entry
            made = [self._make(part, args) for part in parts]
            return made[0] if kind is FakeTensor else kind(made)
        result = compute(args, kwargs)
        if key is not None:
            self._remember(key, args, result)
        return result

    def _make(self, part: Any, args: tuple[Any, ...]) -> Any:
        if not isinstance(part, _Made):
            return part
        if part.is_argument:
            return args[part.argument or 0]
        empty = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
        if part.argument is not None:
            storage: Any = args[part.argument].untyped_storage()
            empty.set_(storage, part.offset, part.shape, part.stride)  # type: ignore[call-overload]
        return self._fake(empty, part.device)

    def _fake(self, empty: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor with the state of the first one on the device, as torch makes it."""
        if device not in self._states:
            self._states[device] = vars(FakeTensor(self._mode, empty, device)).copy()
        fake: Tensor = Tensor._make_subclass(FakeTensor, empty, False, device_for_backend_keys=device)  # type: ignore[call-arg]
        vars(fake).update(self._states[device])
        return fake

    def _remember(self, key: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note the result of a call, unless it is unusual."""
        if key in self._known or key[0]._schema.name in _CHANGES_TENSORS:
            return
        kind = type(result)
        try:
            if result is None or kind is FakeTensor:
                parts = [_made(result, key[2], args)]
            elif kind in (list, tuple):
                parts = [_made(each, key[2], args) for each in result]
                own = [each for each, part in zip(result, parts, strict=True) if _has_storage(part)]
                if len({each.untyped_storage()._cdata for each in own}) < len(own):
                    raise _Unusual
            else:
                raise _Unusual
            self._known[key] = FakeTensor if result is None else kind, parts
        except _Unusual:
            self._known[key] = None


def _has_storage(part: Any) -> bool:
    return isinstance(part, _Made) and part.argument is None


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a call on fake tensors is remembered by; None if it is unusual."""
    if any(isinstance(value, FakeTensor) for value in kwargs.values()):
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
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return (kind, *map(_describe, value))
    raise _Unusual


def _made(result: Any, described: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Return how a result is made again; `described`: the arguments as they were before the call."""
    if type(result) in _PLAIN:
        return result
    looks = _describe(result)
    if result.requires_grad:
        raise _Unusual
    for place, argument in enumerate(args):
        if result is argument:
            if looks != described[place]:
                raise _Unusual
            return _Made(*looks, place, True)
    storage = result.untyped_storage()
    for place, argument in enumerate(args):
        if isinstance(argument, FakeTensor):
            if argument.untyped_storage()._cdata == storage._cdata:
                return _Made(*looks, place)
        elif isinstance(argument, list | tuple) and any(isinstance(each, FakeTensor) for each in argument):
            others = (each.untyped_storage()._cdata for each in argument if isinstance(each, FakeTensor))
            if storage._cdata in others:
                raise _Unusual
    dtype, shape, stride, offset, _ = looks
    extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if offset or storage.nbytes() != extent * dtype.itemsize:
        raise _Unusual
    return _Made(*looks)

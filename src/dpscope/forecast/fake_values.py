"""Values of fake tensors which code may read: ids and masks of a batch, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from dpscope.errors import UserError

LARGEST_VALUE = 2**22  # elements of whole numbers whose values are followed
LARGEST_MADE = 2**18  # elements of such that are made of less: tables of positions, causal masks


class ReadsValues(UserError):
    """The model reads the value of a tensor that has none."""


class FakeValues:
    """Values beside fake tensors. Whole numbers and scalars that are made of known ones are computed on the CPU."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Note what a fake tensor holds."""
        self._values[tensor] = value

    def call(self, func: Any, args: Any, kwargs: Any, make: Callable[[], Any], mode: FakeTensorMode) -> Any:
        """Return the result of an operator on fake tensors, computed by `make`, and track known values."""
        known = self._known_arguments(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(None if known is None else known[0][0])
        if func is torch.ops.aten.equal.default and known is None:
            raise ReadsValues("the model compares tensors of which a plan knows the shapes alone")
        try:
            result = make()
        except DynamicOutputShapeException:
            device = next(each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
            with mode:
                return self._shaped_by_values(func, known, device)
        if known is not None and _is_followed(result, known):
            self._follow(func, known, result)
        return result

    def _shaped_by_values(self, func: Any, known: tuple[Any, Any] | None, device: torch.device) -> Any:
        """Return the result of an operator such as unique, whose shape depends on values, if the values are known."""
        if known is None:
            raise ReadsValues(
                f"{func._schema.name} gives a tensor whose shape depends on values that a plan does not know"
            )
        with _disable_current_modes():
            value = func(*known[0], **known[1])
        results = tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), value)
        for fake, each in zip(tree_leaves(results), tree_leaves(value), strict=True):
            self._values[fake] = each
        return results

    def _known_arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with values in the place of fake tensors; None if one has no value."""
        if func in _RANDOM or any(isinstance(each, FakeTensor) and each not in self._values for each in args):
            return None
        flat, spec = tree_flatten((args, kwargs))
        values = []
        for leaf in flat:
            value = self._values.get(leaf) if isinstance(leaf, FakeTensor) else leaf
            if value is None and leaf is not None:
                return None
            values.append(torch.device("cpu") if isinstance(leaf, torch.device) else value)
        found: tuple[Any, Any] = tree_unflatten(values, spec)
        return found

    def _follow(self, func: Any, known: tuple[Any, Any], result: Any) -> None:
        with _disable_current_modes():
            try:
                value = func(*known[0], **known[1])
            except (RuntimeError, NotImplementedError, TypeError):
                return
        fakes, values = ([leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in (result, value))
        for fake, each in zip(fakes, values, strict=True):
            self._values[fake] = each

    def _read(self, value: Tensor | None) -> Any:
        if value is None:
            raise ReadsValues(
                "the model reads the value of a tensor (.item(), a comparison in an if), and a plan knows shapes alone"
            )
        with _disable_current_modes():
            return value.item()


_RANDOM = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default}


def _is_followed(result: Any, known: tuple[Any, Any]) -> bool:
    """Return whether all results of an operator are small enough, and integers or scalars."""
    made, given = ([leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in (result, known))
    most = min(LARGEST_VALUE, max(LARGEST_MADE, 4 * sum(each.numel() for each in given)))
    return bool(made) and all(
        each.numel() <= most and (not each.dim() or not each.is_floating_point()) for each in made
    )

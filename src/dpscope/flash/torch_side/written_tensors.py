"""Parameters and buffers that a forward writes, and what they held before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class WrittenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context of a run of the model. It keeps the values of parameters and buffers that operators are about to write.

    Writes through `.data` are seen, too, which change no version, and tensors that `.data` is set to.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = [*model.named_parameters(), *model.named_buffers()]
        # (name, tensor, an alias that keeps its memory); tensors of other classes, such as shards, are left out
        self._known = [(name, each, each.data) for name, each in named if type(each.data) is Tensor]
        self._places: dict[int, list[int]] = {}  # of tensors in a storage
        for place, (_, _, alias) in enumerate(self._known):
            self._places.setdefault(alias.untyped_storage().data_ptr(), []).append(place)
        self._before: dict[int, Tensor] = {}  # place -> value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        # max_norm scales a frozen table's rows as they are looked up, whoever looks; that of a trained one is refused.
        if schema is not None and schema.is_mutable and func is not torch.ops.aten.embedding_renorm_.default:
            for tensor in _written(schema, args, kwargs):
                for place in self._places.get(tensor.untyped_storage().data_ptr(), ()):
                    self._before.setdefault(place, self._known[place][2].clone())
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Restore what was written, in whatever dtype it is now."""
        for place, (_, tensor, alias) in enumerate(self._known):
            if tensor.data_ptr() != alias.data_ptr() and tensor.dtype == alias.dtype:
                self._before.setdefault(place, alias.clone())
                tensor.data = alias
        for place, value in self._before.items():
            self._known[place][1].data.copy_(value)

    def names(self) -> list[str]:
        """Return the names of what was written."""
        return [name for place, (name, _, _) in enumerate(self._known) if place in self._before]

    def values(self, names: list[str]) -> list[Tensor]:
        """Return what these hold now, copied."""
        return [each.detach().clone() for name, each, _ in self._known if name in names]


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call of an operator writes to."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if type(tensor) is Tensor or isinstance(tensor, nn.Parameter):
                    yield tensor

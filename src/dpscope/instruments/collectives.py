"""Which collectives a step calls, and the bytes of what they are about."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# c10d's operators, by the names that people know.
_NAMES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
}


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, the bytes of each collective: those of the larger side, input or output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[str, int] = {}
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            if tensors:
                operator = func.overloadpacket.__name__
                name = _NAMES.get(operator, operator.strip("_"))
                self.bytes[name] = self.bytes.get(name, 0) + max(tensor.nbytes for tensor in tensors)
                self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> CollectiveBytes:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

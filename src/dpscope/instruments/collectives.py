"""Collectives of a step: which it calls, their bytes, and what one rank sends for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.results.payloads.ranks import Collective

# c10d's operators, by the names that people know.
_NAMES = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "broadcast_": "broadcast",
}
# What a rank sends for each byte of the larger side among n ranks, by the ring algorithm; 1 for all others.
_SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts calls and bytes of each collective: bytes of the larger side, input or output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: dict[str, Collective] = {}
        self.dtypes: dict[str, set[torch.dtype]] = {}

    @property
    def bytes(self) -> dict[str, int]:
        return {name: each["bytes"] for name, each in self.collectives.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: Any) -> None:
        # One side is a list of tensors or a single tensor; a coalesced call has several of each.
        sides = [_tensors(arg) for arg in args]
        tensors = [tensor for side in sides for tensor in side]
        if not tensors:
            return
        name = _NAMES.get(operator, operator.strip("_"))
        size = max(sum(tensor.nbytes for tensor in side) for side in sides)
        found = self.collectives.setdefault(name, {"calls": 0, "bytes": 0, "sent_bytes": 0})
        found["calls"] += 1
        found["bytes"] += size
        factor = _SENT.get(name)
        found["sent_bytes"] += size if factor is None else round(size * factor(_group_size(args)))
        self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)


def _tensors(arg: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arg) if isinstance(leaf, Tensor)]


def _group_size(args: Any) -> int:
    """Return the size of the process group among the arguments of one of c10d's operators."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).size()
    return dist.get_world_size()

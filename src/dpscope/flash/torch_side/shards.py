"""A sharded parameter (a DTensor of FSDP2) and the part of it that this rank holds.

FSDP2 cuts dimension 0 into contiguous chunks of ⌈rows / ranks⌉ rows; the last ranks may hold fewer, or none. So a shard
is a contiguous range of the elements of the whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@lru_cache(maxsize=64)
def is_shard_type(cls: type) -> bool:
    return any(base.__name__ == "DTensor" for base in cls.__mro__)  # by name: its import takes a second


def is_sharded(tensor: Tensor) -> bool:
    """Return True if the tensor is a DTensor: each rank holds a part of it."""
    return is_shard_type(type(tensor))


def lies_here(tensor: Tensor) -> bool:
    """Return True if all of the tensor is in this process."""
    return not is_sharded(tensor)


def is_whole_of(tensor: Tensor | None, shard: nn.Parameter) -> bool:
    """Return True if a tensor may be the whole parameter that FSDP2 puts in the place of a shard around forward."""
    return (
        is_sharded(shard)
        and tensor is not None
        and type(tensor) in (nn.Parameter, FakeTensor)  # the latter in a dry run
        and tensor.shape == shard.shape
        and tensor.requires_grad == shard.requires_grad
    )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory, or the tensor itself if it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return `local` of each tensor; the list itself if none is sharded."""
    return [local(tensor) for tensor in tensors] if any(map(is_shard_type, set(map(type, tensors)))) else tensors


class ShardCut(NamedTuple):
    """Cut of dimension 0 of a tensor into `ranks` chunks of `rows` rows of `width` elements."""

    ranks: int
    rank: int
    rows: int
    width: int
    total: int  # rows of the whole tensor

    @property
    def span(self) -> int:
        """Elements of a chunk, padding included."""
        return self.rows * self.width

    @property
    def first(self) -> int:
        """The number of this rank's first element in the whole."""
        return min(self.rank * self.rows, self.total) * self.width

    @property
    def held(self) -> int:
        """Elements that this rank holds."""
        return min((self.rank + 1) * self.rows, self.total) * self.width - self.first


def shard_dim(parameter: Any) -> int:
    """Return the dimension of the mesh that shards a parameter: the last one (HSDP has replicas before it)."""
    return len(parameter.placements) - 1


def cut_of(parameter: Any) -> ShardCut:
    """Return the cut of a sharded parameter."""
    mesh, dim = parameter.device_mesh, shard_dim(parameter)
    ranks = mesh.size(dim)
    total = parameter.shape[0]
    return ShardCut(ranks, mesh.get_local_rank(dim), -(-total // ranks), parameter.shape[1:].numel(), total)


def first_element(parameter: Tensor) -> int:
    """Return the number, in the whole parameter, of the first element that this rank holds."""
    return cut_of(parameter).first if is_sharded(parameter) else 0


def as_part_of(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Return this rank's part of a gradient in the form that the parameter's `.grad` holds."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    spread: Any = parameter
    return DTensor.from_local(
        part, spread.device_mesh, spread.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
